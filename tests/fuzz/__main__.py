"""`scripts/test --fuzz N --seed S`: N drawn files are dealt out to the targets; a failure is shrunk
and shown, and the next file follows."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.fuzz.runs import fuzz
from tests.fuzz.targets import TARGETS


def main() -> None:
    parser = argparse.ArgumentParser("scripts/test")
    parser.add_argument("--files", type=int, required=True, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--only", choices=sorted(TARGETS), action="append")
    arguments = parser.parse_args()
    chosen = {name: share for name, (_, _, share) in TARGETS.items() if name in (arguments.only or TARGETS)}
    failed, whole = 0, 0
    for name, share in chosen.items():
        began = time.monotonic()
        try:
            tried = fuzz(name, max(round(arguments.files * share / sum(chosen.values())), 1), arguments.seed)
        except Exception:
            traceback.print_exc()
            failed += 1
            print(f"{name}: FAILED", flush=True)
        else:
            whole += tried
            print(f"{name}: {tried} files, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{whole} files, {failed} targets failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
