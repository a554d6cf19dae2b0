"""The entry of `tightfit` and `python -m tightfit`: runs a command and turns what goes wrong into an exit code.

0 done, 1 the run failed, 2 the input is wrong, 3 it does not fit.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Errors end in a message and an exit code; --traceback before the command shows where."""
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
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("tightfit: interrupted", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if show:
            raise
        from tightfit.report.failure import describe_failure

        print(f"tightfit: {describe_failure(error)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
