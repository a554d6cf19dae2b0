"""Check tightfit on one GPU with one command: tests, every method, predictions, speed beside others.

    python benchmarks/gpu.py --out results --wheels wheels      # on a machine with a GPU, from the source tree
    python benchmarks/gpu.py --cpu --out results                # a small copy of every part, on a CPU, in a minute
    python benchmarks/gpu.py --only 5,6 --out results           # some parts; a record there keeps the others,
                                                                # and they plan with its calibration
    python benchmarks/gpu.py --readme                           # the table of records/gpu.json, in Markdown

Only torch has to be installed. Other missing packages come from a folder of wheels, which
scripts/collect_wheels fills. Each part is a process of its own with a time-out. The most important
parts run first. When the time budget is nearly spent, the remaining parts are left out, and the output
says so. `--out` receives gpu.json (what all parts found), tests.txt and log.txt. Tests and methods are not timed: they run at the same
time. So do several tests, where pytest-xdist is installed.

Exit codes: 0 if all requested parts are done, 1 if one failed or ran out of its time, 3 if there was
too little time for some.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "src")]  # in place of this file's folder

from benchmarks import harness  # noqa: E402
from benchmarks.gpu_sizes import CPU, GPU, LIMIT_S, ORDER  # noqa: E402

RECORD = ROOT / "records" / "gpu.json"
LEAST_S = 12.0  # left of the budget, without which no part is begun
KEPT_S = 8.0  # of the budget, for what the parent does at the end
CPU_PATIENCE = 10  # with --cpu, a part may take this many times its limit: a processor may be slow or busy
SAID = 1500  # characters of a part's last output in the record
UNTIMED = ("tests", "methods")  # parts that run at the same time, because they time nothing
NEVER_UNPACKED = ("torch", "triton", "nvidia", "cuda")  # the installed ones were built for this driver
DONE, FAILED, OUT_OF_TIME = 0, 1, 3


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--record", type=Path, help="also write what was found to this file, such as records/gpu.json")
    parser.add_argument("--wheels", type=Path, help="folder of wheels, for packages that are missing or too old")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds that all parts may take together")
    parser.add_argument("--only", default="", help=f"parts, by number or name: {', '.join(ORDER)}")
    parser.add_argument("--cpu", action="store_true", help="a small copy of every part, on a processor, in one process")
    parser.add_argument(
        "--readme", nargs="?", type=Path, const=RECORD, help="print a record's table in Markdown, and end"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limits", help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if not (found.out or found.readme or found.child):
        parser.error("say where the results go: --out FOLDER")
    return found


def chosen(only: str) -> list[str]:
    """The parts that are asked for, in their order. Ends the program for a part that there is not."""
    asked = [word.strip() for word in only.split(",") if word.strip()]
    names = [ORDER[int(word) - 1] if word.isdigit() and 0 < int(word) <= len(ORDER) else word for word in asked]
    unknown = [name for name in names if name not in ORDER]
    if unknown:
        sys.exit(
            f"no part {', '.join(unknown)}; there are {', '.join(f'{n} {name}' for n, name in enumerate(ORDER, 1))}"
        )
    return [name for name in ORDER if not names or name in names]


# --- packages from wheels -------------------------------------------------------------------------------------------


def unpack(wheels: Path, target: Path) -> list[str]:
    """Unpack the wheels of packages that are missing here, or older than the wheel; returns what was unpacked."""
    taken = []
    for wheel in sorted(wheels.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        if name.lower().startswith(NEVER_UNPACKED) and not name.lower().startswith("torchao"):
            continue
        if not is_newer(version, installed(name)):
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
        for part in target.glob("*.data"):
            for kind in ("purelib", "platlib"):
                if (part / kind).is_dir():
                    shutil.copytree(part / kind, target, dirs_exist_ok=True)
            shutil.rmtree(part)
        taken.append(f"{name} {version}")
    return taken


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_newer(version: str, than: str | None) -> bool:
    """Whether a version is later than what is installed, or nothing is."""
    if than is None:
        return True
    numbers = [[int(number) for number in re.findall(r"\d+", text.split("+")[0])] for text in (version, than)]
    return numbers[0] > numbers[1]


# --- parts, as processes --------------------------------------------------------------------------------------------


def environment(arguments: argparse.Namespace, packages: Path, work: Path) -> dict[str, str]:
    """Of the parts: the source tree and the unpacked wheels on their path, a cache of their own, no network, one device."""
    path = [str(ROOT / "src"), str(ROOT), str(packages), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "XDG_CACHE_HOME": str(work / "cache"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "USE_PYTORCH_KERNEL_CACHE": "0",  # torch warns where it cannot create this cache
    }
    if (
        arguments.cpu
    ):  # tiny nets gain nothing from a second thread, and lose much where something else runs beside them
        return {**found, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**found, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def together(names: list[str]) -> list[list[list[str]]]:
    """Group the parts: those of one group run at the same time, each in its own process."""
    beside = [name for name in names if name in UNTIMED]
    alone = [[[name]] for name in names if name not in UNTIMED]
    if not beside:
        return alone
    first = sum(name == "machine" for name in names)
    return [*alone[:first], [[name] for name in beside], *alone[first:]]


def run_child(arguments: argparse.Namespace) -> None:
    """The parts named by --child, in this process."""
    from benchmarks.gpu_parts import run_parts

    names = arguments.child.split(",")
    sizes, device = (CPU, "cpu") if arguments.cpu else (GPU, "cuda")
    run_parts(names, sizes, device, json.loads(arguments.limits), arguments.work)


def run_group(
    names: list[str],
    arguments: argparse.Namespace,
    limits: dict[str, float],
    left_s: float,
    work: Path,
    environ: dict[str, str],
) -> None:
    """Run parts in one process, which has the time of all of them, or what is left. What each found is in `work`/NAME.json."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--child", ",".join(names), "--work", str(work)]
    command += ["--limits", json.dumps(limits), *(["--cpu"] if arguments.cpu else [])]
    with (work / f"{names[0]}.log").open("w") as log:
        child = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=min(sum(limits[name] for name in names), left_s))
        finally:  # with the processes that it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def result_of(name: str, log: Path, work: Path, limit_s: float) -> dict[str, Any]:
    """A part's status and what it found; of one that did not end by itself, the last lines of its output."""
    path = work / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {"status": "failed", "result": {}}
    if found["status"] == "under way" or "seconds" not in found:
        said = log.read_text(errors="replace")[-SAID:] if log.exists() else ""
        over = found["status"] == "under way"
        found |= {"status": "timed out or died" if over else "failed", "said": said, "limit_s": limit_s}
    return found


def run(arguments: argparse.Namespace) -> int:
    """Run the parts, merge what they found, and print a table. Returns how it ended."""
    began, names = time.monotonic(), chosen(arguments.only)
    arguments.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="tightfit-gpu-", ignore_cleanup_errors=True) as folder:
        work, packages = Path(folder) / "work", Path(folder) / "packages"
        work.mkdir()
        packages.mkdir()
        taken = unpack(arguments.wheels, packages) if arguments.wheels else []
        sys.path.append(str(packages))
        print(f"unpacked from wheels: {', '.join(taken) or 'nothing'}", flush=True)
        environ = environment(arguments, packages, work)
        earlier = others(arguments.out / "gpu.json", "cpu" if arguments.cpu else "cuda").get("calibration", {})
        if earlier.get("status") == "done":
            harness.write_json(work / "calibrated.json", earlier["result"]["machine"])
        for processes in [[names]] if arguments.cpu else together(names):
            group = [name for process in processes for name in process]
            left = arguments.budget - KEPT_S - (time.monotonic() - began)
            if left < LEAST_S or (parts and parts.get("machine", {}).get("status", "done") != "done"):
                why = "the budget is spent" if left < LEAST_S else "the part machine failed"
                parts |= {name: {"status": "left out", "said": why, "result": {}} for name in group}
                continue
            limits = {name: min(LIMIT_S[name] * (CPU_PATIENCE if arguments.cpu else 1), left) for name in group}
            with ThreadPoolExecutor() as pool:
                running = [pool.submit(run_group, one, arguments, limits, left, work, environ) for one in processes]
                for one in running:
                    one.result()
            for process in processes:
                for name in process:
                    parts[name] = result_of(name, work / f"{process[0]}.log", work, limits[name])
                    print(line_of(name, parts[name]), flush=True)
            keep(arguments, parts, taken, work, time.monotonic() - began)
        keep(arguments, parts, taken, work, time.monotonic() - began)
    show(parts)
    return status_of(parts)


def status_of(parts: dict[str, dict[str, Any]]) -> int:
    kinds = {part["status"] for part in parts.values()}
    if kinds - {"done", "left out"}:
        return FAILED
    return OUT_OF_TIME if "left out" in kinds else DONE


def keep(
    arguments: argparse.Namespace, parts: dict[str, dict[str, Any]], taken: list[str], work: Path, seconds: float
) -> None:
    """Write what is known so far: it stays when this process is ended from outside."""
    content = {
        "device": "cpu" if arguments.cpu else "cuda",
        "python": platform.python_version(),
        "seconds": seconds,
        "from_wheels": taken,
    }
    for path in (arguments.out / "gpu.json", arguments.record):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            earlier = others(path, content["device"]) if arguments.only else {}
            done = {name: part for name, part in parts.items() if part["status"] != "left out" or name not in earlier}
            merged = {name: {**earlier, **done}[name] for name in ORDER if name in earlier or name in done}
            harness.write_json(path, {**content, "parts": merged})
    if (work / "tests.txt").exists():
        shutil.copy(work / "tests.txt", arguments.out / "tests.txt")
    logs = [*sorted(work.glob("*.log")), *sorted(work.glob("*.contender.txt"))]
    lines = [f"===== {path.name}\n{path.read_text(errors='replace')[-20_000:]}\n" for path in logs]
    (arguments.out / "log.txt").write_text("".join(lines))


def others(path: Path, device: Any) -> dict[str, dict[str, Any]]:
    """The parts of a record that is there already, where it is of the same kind of device."""
    try:
        found = json.loads(path.read_text())
        return found["parts"] if found["device"] == device else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


# --- what is shown --------------------------------------------------------------------------------------------------


def line_of(name: str, part: dict[str, Any]) -> str:
    seconds = f"{part['seconds']:6.1f} s" if "seconds" in part else "        "
    return f"{ORDER.index(name) + 1} {name:12s} {part['status']:10s} {seconds}  {'; '.join(said_of(name, part))}"


def show(parts: dict[str, dict[str, Any]]) -> None:
    """A table of all parts, and what those that failed said at the end."""
    rows = []
    for name, part in parts.items():
        seconds = f"{part['seconds']:.1f}" if "seconds" in part else ""
        rows.append([str(ORDER.index(name) + 1), name, part["status"], seconds, "\n".join(said_of(name, part))])
    harness.print_table(("", "part", "", "seconds", "found"), rows, left=5)
    for name, part in parts.items():
        if part["status"] not in ("done", "left out") and part.get("said"):
            print(f"--- {name}: {part['status']}\n{part['said']}")


def said_of(name: str, part: dict[str, Any]) -> list[str]:
    """What a part found, in lines; of one that found nothing, why."""
    found = part.get("result") or {}
    lines = SAYS[name](found) if found else []
    return lines or [part.get("said", "").strip().splitlines()[-1] if part.get("said", "").strip() else ""]


def _machine_said(found: dict[str, Any]) -> list[str]:
    return [f"{found['machine']['name']}, torch {found['code']['torch']}, driver {found['driver'] or 'none'}"]


def _tests_said(found: dict[str, Any]) -> list[str]:
    return [f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped {found['ended']}".strip()]


def _methods_said(found: dict[str, Any]) -> list[str]:
    kinds = ("agrees", "differs", "failed", "refused", "left out")
    return [", ".join(f"{found[kind]} {kind}" for kind in kinds)] if "rows" in found else []


def _calibration_said(found: dict[str, Any]) -> list[str]:
    rates = found["machine"]["matrix_flops_per_s"]
    return [", ".join(f"{kind} {figure['value'] / 1e12:.3g} TFLOP/s" for kind, figure in rates.items())]


def _llama_said(found: dict[str, Any]) -> list[str]:
    if "tokens_per_s" not in found:
        return [f"{one['model']}: {one.get('said', 'under way')[:120]}" for one in found.get("attempts", [])]
    smaller = "" if found["model"] == found["asked"] else f" (in place of {found['asked']})"
    return [f"{found['model']}{smaller}: {_speed(found)}", f"plan {found['plan']}", *_bytes(found)]


def _speed(found: dict[str, Any]) -> str:
    share = found.get("mfu_of_published_peak")
    return f"{found['tokens_per_s'] or 0:.0f} tokens/s{f', MFU {share:.1%}' if share else ''}"


def _bytes(found: dict[str, Any]) -> list[str]:
    """Measured and predicted bytes, in GB."""
    predicted = found.get("predicted") or {}
    pairs = [(kind, found.get(f"{kind}_bytes"), predicted.get(f"{kind}_bytes")) for kind in ("allocated", "reserved")]
    return [f"{kind} {_gb(seen)} GB, predicted {_gb(meant)}" for kind, seen, meant in pairs if seen]


def _gb(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.2f}"


def _ladder_said(found: dict[str, Any]) -> list[str]:
    return [f"{row['name']}: {'; '.join(_bytes(row)) or row.get('said', '')[-80:]}; published {_gb(row['published_bytes'])}"
            for row in found.get("rungs", [])]  # fmt: skip


def _rivals_said(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, one in found.get("models", {}).items():
        rates = ", ".join(f"{kind} {rate:.0f}" for kind, rate in one.get("tokens_per_s", {}).items())
        ratios = ", ".join(f"{ratio:.2f} x {kind}" for kind, ratio in one.get("tightfit_over", {}).items())
        missing = "".join(f"; no {kind}" for kind in one.get("missing", {}))
        lines.append(f"{name}: tokens/s {rates}; tightfit {ratios}{missing}")
    return lines


def _largest_said(found: dict[str, Any]) -> list[str]:
    lines = []
    for way, row in found.get("ways", {}).items():
        size = f"{row['parameters'] / 1e9:.3g}B parameters" if row.get("parameters") else "none fits"
        lines.append(f"{way}: {size}; {'; '.join(_bytes(row['trained'])) if 'trained' in row else 'predicted'}")
    return lines


def _kernels_said(found: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {table[0]['name'][:60]} {table[0]['share']:.0%}" for name, table in found.get("tables", {}).items()
    ]


SAYS = {
    "machine": _machine_said,
    "tests": _tests_said,
    "methods": _methods_said,
    "calibration": _calibration_said,
    "llama": _llama_said,
    "ladder": _ladder_said,
    "rivals": _rivals_said,
    "largest": _largest_said,
    "kernels": _kernels_said,
}


def readme(record: dict[str, Any]) -> str:
    """The README's table of a record, in Markdown: one row for each thing that was measured."""
    parts = {name: part.get("result") or {} for name, part in record["parts"].items()}
    rows: list[tuple[str, str, str]] = []
    tests, held = parts.get("tests", {}), parts.get("methods", {})
    if tests:
        rows.append(("GPU tests", f"{tests['passed']} passed, {tests['failed']} failed", ""))
    if "rows" in held:
        rows.append(("methods beside the reference plan", f"{held['agrees']} agree, {held['differs']} differ", ""))
    one = parts.get("llama", {})
    if "tokens_per_s" in one:
        rows.append((f"{one['model']}, AdamW, {one['length']} tokens", _speed(one), "; ".join(_bytes(one))))
    ladder = parts.get("ladder", {})
    for row in ladder.get("rungs", []):
        beside = "; ".join([*_bytes(row), f"published {_gb(row['published_bytes'])} GB"])
        rows.append(
            (f"{ladder['model']['preset']}: {row['name']}", f"{row.get('samples_per_s') or 0:.0f} images/s", beside)
        )
    for name, model in parts.get("rivals", {}).get("models", {}).items():
        for kind, rate in model.get("tokens_per_s", {}).items():
            ratio = model.get("tightfit_over", {}).get(kind)
            rows.append((f"{name}: {kind}", f"{rate:.0f} tokens/s", f"tightfit is {ratio:.2f} x this" if ratio else ""))
    for way, row in parts.get("largest", {}).get("ways", {}).items():
        if row.get("parameters"):
            beside = "; ".join(_bytes(row["trained"])) if "trained" in row else "predicted"
            rows.append((f"largest Llama: {way}", f"{row['parameters'] / 1e9:.3g}B parameters", beside))
    unfinished = [f"{name}: {part['status']}" for name, part in record["parts"].items() if part["status"] != "done"]
    if unfinished:
        rows.append(("parts that did not finish", "; ".join(unfinished), "the record holds what they found"))
    machine = parts.get("machine", {})
    said = f"{machine['machine']['name']}, torch {machine['code']['torch']}" if machine else "machine not known"
    lines = [f"| {said} | measured | beside it |", "| --- | --- | --- |", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    if arguments.readme:
        if not arguments.readme.exists():
            sys.exit(f"there is no {arguments.readme}: run benchmarks/gpu.py on a GPU with --record {arguments.readme}")
        print(readme(json.loads(arguments.readme.read_text())))
    elif arguments.child:
        run_child(arguments)
    else:
        sys.exit(run(arguments))


if __name__ == "__main__":
    main()
