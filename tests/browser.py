"""A headless Chromium driven through chromedriver, with nothing but the standard library.

Source: https://www.w3.org/TR/webdriver2/, the commands named in the paths.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

PATIENCE = 120.0
"""Seconds that anything may take before it counts as stuck: a machine under load is no failure."""

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Browser:
    """One session; leave it as a context manager. `profile` is a new, empty directory."""

    def __init__(self, profile: Path) -> None:
        driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
        if driver is None or chromium is None:
            raise FileNotFoundError(
                "chromium and chromedriver are not there; "
                "run: apt-get install --no-install-recommends chromium chromium-driver"
            )
        self._log = profile / "driver.log"
        with self._log.open("w", encoding="utf-8") as log:
            self._driver = subprocess.Popen(
                [driver, "--port=0"], stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "HOME": str(profile)}
            )
        self._session = ""
        try:
            self._base = f"http://127.0.0.1:{self._port()}"
            options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile / 'user'}"]}
            capabilities = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
                "timeouts": {"script": PATIENCE * 1000, "pageLoad": PATIENCE * 1000, "implicit": 0},
            }
            found = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
            self._session = f"/session/{found['sessionId']}"
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._stop()

    def open(self, path: Path) -> None:
        """Loads a local file and waits until the page says that it is ready."""
        self._call("POST", "/url", {"url": "about:blank"})
        self._call("POST", "/url", {"url": path.resolve().as_uri()})
        self.wait("document.documentElement.dataset.ready === 'yes'")

    def run(self, script: str, *arguments: object) -> Any:
        """Returns what a script of the page returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def value(self, expression: str) -> Any:
        return self.run(f"return {expression};")

    def wait(self, expression: str) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.value(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} did not become true in {PATIENCE} s; console: {self.console()}")
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Clicks like a person: the element must be visible and nothing may cover it."""
        self._call("POST", f"/element/{self._element(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Sends keys to an element; private-use characters are special keys."""
        self._call("POST", f"/element/{self._element(selector)}/value", {"text": text})

    def point(self, x: float, y: float) -> None:
        """Moves the pointer to a place of the viewport."""
        move = {"type": "pointerMove", "duration": 0, "x": int(x), "y": int(y)}
        self._call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def resize(self, width: int, height: int, *, mobile: bool = False, ratio: float = 1) -> None:
        """Gives the viewport a size, whatever window there is."""
        parameters = {"width": width, "height": height, "deviceScaleFactor": ratio, "mobile": mobile}
        self.devtools("Emulation.setDeviceMetricsOverride", parameters)

    def prefer(self, scheme: str) -> None:
        """Asks pages for their light or dark appearance, and for no motion: what moves cannot be clicked."""
        wishes = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})

    def devtools(self, command: str, parameters: Mapping[str, object]) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": dict(parameters)})

    def console(self) -> list[str]:
        """Returns what was written to the console since the last call, violations of the page's policy included."""
        return [f"{line['level']}: {line['message']}" for line in self._call("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def _element(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return str(next(iter(found.values())))

    def _port(self) -> int:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            text = self._log.read_text(encoding="utf-8")
            if "started successfully on port" in text:
                return int(text.partition("started successfully on port")[2].split(".")[0])
            if self._driver.poll() is not None:
                break
            time.sleep(0.05)
        raise TimeoutError(f"chromedriver did not start: {self._log.read_text(encoding='utf-8')}")

    def _call(self, method: str, path: str, body: object = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base + self._session + path, content, {"Content-Type": "application/json"}, method=method
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=2 * PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(f"{method} {path}: {error.read().decode(errors='replace')[:2000]}") from None

    def _stop(self) -> None:
        self._driver.terminate()
        try:
            self._driver.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()
