"""runtime/terminal.py: a program and its terminal: one line for a mistake, exit codes.

Exit codes: 0, 1 (training cannot go on), 2 (a mistake of the user's), 128 + the number of a signal.
"""

import os
import sys
from collections.abc import Callable

from runtime.config import AttemptLost, Config, TrainingStopped, UserError, parse, words


def run_main(main: Callable[[Config], None], description: str, program: type = Config) -> None:
    """Parse, run, and turn the user's mistakes into one line and exit code 2, trouble into 1.
    --help shows what the program is and how it is run, the first two paragraphs."""
    open_streams()
    try:
        main(parse("\n\n".join(description.split("\n\n")[:2]), sys.argv[1:], program))
    except UserError as error:
        fail(error)
    except AttemptLost as error:
        begin_again(error)
    except (TrainingStopped, OSError) as error:
        fail(f"stopped: {error}", 1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def begin_again(error: AttemptLost) -> None:
    """This program in place of this process, with the flags of a resume; exit code 1 when that has
    happened `restarts` times. What runs in other processes has ended with the attempt."""
    folder, config = error.run
    attempt = int(os.environ.get("NANOGLM_ATTEMPT", 0)) + 1
    if attempt > config.restarts:
        fail(f"{error}; stopped: --set restarts={config.restarts} are used up", 1)
    what = f"begins again (attempt {attempt + 1}) from the newest checkpoint"
    sys.stderr.write(printable(f"\n{error}; {what}\n"))
    os.environ["NANOGLM_ATTEMPT"] = str(attempt)
    flags = words({"resume": folder, "task": config.task, "cluster": config.cluster})
    os.execv(sys.executable, [sys.executable, sys.argv[0], *flags])


def fail(error: Exception | str, code: int = 2) -> None:
    """Print one line to stderr and end the process with an exit code."""
    sys.stderr.write(printable(" ".join(str(error).split())) + "\n")
    raise SystemExit(code)


def printable(text: str) -> str:
    """Text with every control character but the end of a line escaped: a terminal obeys others."""
    return "".join([c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text])


def open_streams() -> None:
    """A terminal that cannot print a character prints its number."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="backslashreplace")
