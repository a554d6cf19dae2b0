"""The entry point of `tightfit` and `python -m tightfit`: runs a command and turns errors into exit
codes.

Exit codes: 0 success, 1 the run failed, 2 the input is wrong, 3 the job does not fit the memory,
128 + n signal n ended the run.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def main() -> None:
    """Run the command line. If the command fails, print a message and exit with an exit code (see
    the module). With --traceback, raise the error instead, so that Python prints its traceback."""
    from tightfit.errors import TightfitError

    show = "--traceback" in sys.argv
    if show:
        sys.argv.remove("--traceback")
    try:
        from tightfit.cli import app

        app()
    except TightfitError as error:
        if show:
            raise
        print(f"tightfit: {type(error).__name__}: {error}", file=sys.stderr)
        _end(error.exit_code)
    except KeyboardInterrupt:
        print("tightfit: interrupted", file=sys.stderr)
        _end(128 + signal.SIGINT)
    except SystemExit as ended:
        _end(ended.code)
    except Exception as error:
        if show:
            raise
        from tightfit.report.unexpected_errors import describe_failure

        print(f"tightfit: {describe_failure(error)}", file=sys.stderr)
        _end(1)


def _end(code: str | int | None) -> NoReturn:
    """Exit the process with this exit code; None and 0 mean success.

    A failing process of a distributed training skips Python's cleanup (os._exit), because threads
    that wait in collectives would block the exit or change the exit code.
    """
    group = sys.modules.get("torch.distributed.distributed_c10d")
    if code and isinstance(code, int) and group is not None and group.is_initialized() and group.get_world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
