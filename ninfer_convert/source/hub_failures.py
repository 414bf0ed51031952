"""What the failures of the hub client mean: which error of ours each is, in one message, and whether it may pass.

Owns the client's exceptions. Refuses to know what was asked for, beyond how to name it.

Source: cli.md, "Exit codes".
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ninfer_convert.errors import ConvertError, NetworkError, OutputError, SourceError, printable

_BUSY = (408, 425, 429, 500, 502, 503, 504)


def untyped(module: str) -> Any:
    """Returns a module of the client; much of it is public and not declared to type checkers."""
    return importlib.import_module(f"huggingface_hub.{module}")


@contextmanager
def told(where: str, repo: str, revision: str) -> Iterator[None]:
    """Raises what the client raises inside the block as an error of ours; arguments as those of `failure`."""
    try:
        yield
    except ConvertError:
        raise
    except (untyped("errors").HTTPError, OSError, ValueError) as error:
        raise failure(error, where, repo, revision) from error


def is_passing(error: Exception) -> bool:
    """Tells whether the same request may succeed a moment later."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code in _BUSY
    return not isinstance(error, OSError) and "ProxyError" not in _kinds(error)


def _kinds(error: BaseException) -> set[str]:
    # By name, because the client does not say which HTTP library it uses.
    return {kind.__name__ for kind in type(error).__mro__}


def failure(error: BaseException, where: str, repo: str, revision: str) -> ConvertError:
    """Returns the error of ours that a failure of the client is.

    Args:
        where: names what was asked for, fit for a message.
        repo, revision: of what was asked for.
    """
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    login = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{repo}"
        return SourceError(f"{where}: the repository is gated; ask for access at {page}, then {login}")
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(f"{where}: the repository has no revision {printable(revision)}")
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return SourceError(f"{where}: the repository has no such file")
    if isinstance(error, errors.DisabledRepoError):
        return SourceError(f"{where}: access to the repository is disabled by the hub")
    if isinstance(error, errors.HfHubHTTPError):
        return _refusal(error, where, login)
    return _broken(error, where)


def _refusal(error: Any, where: str, login: str) -> ConvertError:
    from huggingface_hub import errors

    status = error.response.status_code
    said = printable(error.response.headers.get("X-Error-Message") or error.server_message or "")
    told = f"HTTP {status}" + (f", {said}" if said else "")
    if isinstance(error, errors.RepositoryNotFoundError):
        return SourceError(
            f"{where}: no such repository, or a private one that is not yours to see ({told}); check owner and name, "
            f"or {login}"
        )
    if status in (401, 403):
        return SourceError(f"{where}: the hub refuses access ({told}); {login}")
    if status in _BUSY:
        return NetworkError(f"{where}: the hub cannot serve now ({told}); try again later")
    return SourceError(f"{where}: the hub refuses ({told})")


def _broken(error: BaseException, where: str) -> ConvertError:
    from huggingface_hub import constants

    kinds, text = _kinds(error), printable(str(error)) or type(error).__name__
    if "OfflineModeIsEnabled" in kinds:
        return SourceError(f"{where}: is not in the hub cache, and HF_HUB_OFFLINE is set")
    if "ProxyError" in kinds:
        return NetworkError(f"{where}: the proxy does not let us through ({text}); see HTTPS_PROXY and NO_PROXY")
    if "TimeoutException" in kinds:
        return NetworkError(
            f"{where}: {constants.ENDPOINT} did not answer in time ({text}); HF_HUB_ETAG_TIMEOUT and "
            "HF_HUB_DOWNLOAD_TIMEOUT say how many seconds to wait"
        )
    if "ConnectError" in kinds:
        return NetworkError(
            f"{where}: {constants.ENDPOINT} cannot be reached ({text}); HF_HUB_OFFLINE=1 uses what the cache holds"
        )
    if "FileMetadataError" in kinds:
        return NetworkError(f"{where}: {constants.ENDPOINT} does not answer like a hub ({text.splitlines()[0]})")
    if isinstance(error, (untyped("errors").HTTPError, EOFError)) or "Consistency check failed" in text:
        return NetworkError(f"{where}: the transfer broke off ({text.splitlines()[0]})")
    if isinstance(error, OSError):
        return OutputError(f"{where}: cannot be stored in the hub cache: {error.strerror or text}")
    return SourceError(f"{where}: the hub client refuses: {text.splitlines()[0]}")
