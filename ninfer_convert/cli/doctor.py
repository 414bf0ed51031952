"""`doctor`: what a run would find on this machine."""

from __future__ import annotations

import click

from ninfer_convert.cli.options import print_json
from ninfer_convert.cli.output import say
from ninfer_convert.doctor import Finding, examine


@click.command()
@click.option("--warm", is_flag=True, help="Compile every kernel that is not kept yet, so that no run has to.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(warm: bool, as_json: bool) -> int:
    """Show versions, what this process may use, and where things are kept; one line for each.

    Nothing is fetched, and no token is shown. --warm compiles what a first run would, some seconds for each kernel.

    Exit code: 0 all is well, or worth a note; 1 there is a problem.

    \b
    Examples:
      ninfer-convert doctor
      ninfer-convert doctor --warm
    """
    found: list[Finding] = []
    for finding in examine(warm=warm):
        found.append(finding)
        if not as_json:
            advice = f"; {finding.fix}" if finding.fix else ""
            say(f"{finding.severity:<9}{finding.subject}: {finding.text}{advice}")
    is_well = all(finding.severity != "problem" for finding in found)
    if as_json:
        members = ("subject", "severity", "text", "value", "fix")
        listed = [{member: getattr(finding, member) for member in members} for finding in found]
        print_json({"ok": is_well, "findings": listed})
    return 0 if is_well else 1
