"""Makes a virtual environment and installs this package with extras, with a line for every phase.

Usage: python scripts/environment.py FOLDER EXTRA[,EXTRA...]
       python scripts/environment.py FOLDER --packages ARGUMENT...    (what `pip install` takes, and no extras)

uv installs, because it downloads in parallel and resolves in seconds. It is taken from the PATH, or installed into the
environment. It gets pip's settings (index, links, certificate). If it cannot be used, pip installs.
"""

from __future__ import annotations

import ast
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
_QUIET_S = 15.0
_SHOWN = re.compile(
    r"\s*(Resolved|Prepared|Installed|Downloading|Building|Collecting|Installing|Successfully|error)\b.*"
)
_SMALL = re.compile(r"Downloading .*\((\d+(?:\.\d+)?)(?:MiB| MB)\)")
_LARGE_MIB = 10.0
_LONGEST_CHARS = 100
_STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _STARTED:4.0f} s] {text}", flush=True)


def main(folder: Path, extras: str) -> int:
    """Install this package with extras into `folder`. Returns the exit code."""
    if sys.version_info < (3, 11):
        print("qreward-plugins is developed on Python 3.11 or later; set PYTHON=python3.11", file=sys.stderr)
        return 1
    # The documentation is built without a trainer.
    torch = [] if extras == "docs" else [TORCH]
    wanted = ["--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[{extras}]"]
    size = "torch and qreward-plugins[{}] with {} (about 1 GB; once)" if torch else "qreward-plugins[{}] with {}"
    # The tests start many processes, and measure times of imports.
    return install(folder, [torch, wanted], size.format(extras, "{}"), compiled="dev" in extras.split(","))


def install(folder: Path, steps: Sequence[Sequence[str]], what: str, *, compiled: bool = False) -> int:
    """Make `folder`, and install packages there. `steps` hold the arguments; pip takes one step at a time. Returns
    the exit code.

    `what` says what is installed, with "{}" for the program. `compiled`: uv also compiles it.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        say(f"1/3 making {folder}")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    steps = [step for step in steps if step]
    uv = _uv(python)
    if uv is not None:
        say(f"3/3 installing {what.format('uv')}")
        command = [uv, "pip", "install", "--python", str(python), "--index-strategy", "unsafe-best-match"]
        if compiled:
            command.append("--compile-bytecode")
        together = [argument for step in steps for argument in step]
        if _relay([*command, *together], {**os.environ, **uv_settings(_pip_settings(python))}) == 0:
            say("installed")
            return 0
        say("uv could not install; going on with pip")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "--progress-bar", "off"]
    for number, packages in enumerate(steps, 1):
        say(f"3/3 installing {packages[-1]} with pip ({number} of {len(steps)})")
        code = _relay([*pip, *packages], dict(os.environ))
        if code != 0:
            return code
    say("installed")
    return 0


def _uv(python: Path) -> str | None:
    """Return the path of uv; None if it cannot be installed."""
    if found := shutil.which("uv"):
        return found
    inside = python.with_name("uv")
    if not inside.exists():
        say("2/3 installing uv")
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return str(inside) if inside.exists() else None


def _pip_settings(python: Path) -> str:
    command = [str(python), "-m", "pip", "config", "list"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def uv_settings(listed: str) -> dict[str, str]:
    """Translate what `pip config list` prints to variables of uv. Later lines of pip's list win. The values may hold
    passwords, and are never printed.
    """
    found: dict[str, str] = {}
    for line in listed.splitlines():
        name, separator, value = line.partition("=")
        try:
            text = str(ast.literal_eval(value)) if separator else ""
        except (ValueError, SyntaxError):
            continue
        if name.rpartition(".")[0] in ("global", "install", ":env:"):
            found[name.rpartition(".")[2]] = text
    variables = {
        "UV_DEFAULT_INDEX": found.get("index-url", ""),
        "UV_INDEX": " ".join(url for url in found.get("extra-index-url", "").split() if _is_there(url)),
        "UV_FIND_LINKS": ",".join(url for url in found.get("find-links", "").split() if _is_there(url)),
        "SSL_CERT_FILE": found.get("cert", ""),
        "UV_NO_CACHE": "1" if found.get("no-cache-dir", "").lower() in ("1", "true", "yes", "on") else "",
    }
    return {name: value for name, value in variables.items() if value}


def _is_there(url: str) -> bool:
    """pip ignores local folders that do not exist; uv ends with an error."""
    return "://" in url.removeprefix("file://") or Path(url.removeprefix("file://")).exists()


def _relay(command: list[str], environment: Mapping[str, str]) -> int:
    """Run a command, and print its lines about progress, or "still running" after 15 s without output. Return the exit
    code.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    output, last = process.stdout, ""

    def read() -> None:
        for line in output:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    tail: list[str] = []
    try:
        while True:
            try:
                line = lines.get(timeout=_QUIET_S)
            except queue.Empty:
                say(f"    ... still running{last}")
                continue
            if line is None:
                break
            tail = [*tail[-20:], line]
            size = _SMALL.search(line)
            if _SHOWN.fullmatch(line) and not (size and float(size[1]) < _LARGE_MIB):
                say(f"    {line.strip()[:_LONGEST_CHARS]}")
                last = f" ({line.strip()[:_LONGEST_CHARS]})" if not line.startswith("error") else last
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if code != 0:
        print("\n".join(tail), file=sys.stderr)
    return code


if __name__ == "__main__":
    listed = sys.argv[2:3] == ["--packages"] and sys.argv[3:]
    if not listed and (len(sys.argv) != 3 or sys.argv[2].startswith("-")):
        sys.exit(__doc__)
    try:
        sys.exit(
            install(Path(sys.argv[1]), [listed], "packages with {}") if listed else main(Path(sys.argv[1]), sys.argv[2])
        )
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[1:3]} ended with code {error.returncode}")
