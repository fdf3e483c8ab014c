"""A headless Chromium, driven over a pipe by its DevTools protocol, and a server for the files that it opens."""

import fcntl
import functools
import http.server
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 600  # seconds, for slow machines


class Page:
    """One tab. `problems` collects what the page throws, and writes as an error."""

    def __init__(self, program: str, folder: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # The browser reads from 3 and writes to 4; higher numbers keep the shell from overwriting one by the other.
        passed = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", "--window-size=1280,1200", f"--user-data-dir={folder}"]
        flags += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # nothing of the network
        shell = 'exec "$0" "$@" 3<&{} 4>&{}'.format(*passed)
        # chrome://tracing is one of these.
        (folder / "Local State").write_text(json.dumps({"internal_only_uis_enabled": True}))
        with open(folder / "browser.log", "w") as log:
            command = ["bash", "-c", shell, program, *flags, "about:blank"]
            self.process = subprocess.Popen(command, pass_fds=passed, start_new_session=True, stdout=log, stderr=log)
        for end in (theirs_in, theirs_out, *passed):
            os.close(end)
        self._from = os.fdopen(ours_in, "rb")
        self._to = os.fdopen(ours_out, "wb")
        self._count = 0
        self._session = None
        self.problems = []
        target = next(target for target in self._ask("Target.getTargets")["targetInfos"] if target["type"] == "page")
        self._session = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def resize(self, width: int, height: int) -> None:
        """As the screen of a phone."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=True)

    def open(self, address: str) -> None:
        answer = self._ask("Page.navigate", url=address)
        assert "errorText" not in answer, answer
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, that of a promise when it is kept."""
        answer = self._ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until it is true."""
        until = time.monotonic() + PATIENCE
        while not self.evaluate(expression):
            assert time.monotonic() < until, f"{expression} did not come true; {self.problems}"
            time.sleep(0.1)

    def press(self, key: str, code: int) -> None:
        """A key without a letter, such as Tab with code 9."""
        for kind in ("rawKeyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # the processes of its tabs, too
        self.process.wait()
        self._from.close()
        self._to.close()

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(answer["params"]["exceptionDetails"])
            elif answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.problems.append(answer["params"]["entry"])

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            assert byte, "the browser ended"
            text += byte
        return json.loads(text)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of Chromium, which keeps its own files in `folder`; skips where none is installed."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("Chromium is not installed (Debian: chromium)")
    page = Page(program, folder)
    try:
        yield page
    finally:
        page.close()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which the files of a folder are served."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
