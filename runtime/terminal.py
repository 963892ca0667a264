"""runtime/terminal.py: a program and its terminal: one line for a mistake, exit codes.

Exit codes: 0, 1 (training cannot go on), 2 (a mistake of the user's), 128 + the number of a signal.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from runtime.config import (
    AttemptLost,
    Config,
    TrainingStopped,
    UserError,
    parse,
    words,
)


def run_main(main: Callable[[Config], None], description: str, program: type = Config) -> None:
    """Parse, run, and turn the user's mistakes into one line and exit code 2, trouble into 1.
    --help shows what the program is and how it is run, the first two paragraphs."""
    open_streams()
    try:
        main(parse("\n\n".join((description or "").split("\n\n")[:2]), sys.argv[1:], program))
    except UserError as error:
        fail(error)
    except AttemptLost as error:
        begin_again(error)
    except (TrainingStopped, OSError) as error:
        sys.stderr.write(f"\nstopped: {printable(str(error))}\n")
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def begin_again(error: AttemptLost) -> None:
    """This program in place of this process, with the flags of a resume; exit code 1 when that has
    happened `restarts` times. What runs in other processes has ended with the attempt."""
    folder, config = error.run
    attempt = int(os.environ.get("NANOGLM_ATTEMPT", 0)) + 1
    sys.stderr.write(f"\n{printable(str(error))}; ")
    if attempt > config.restarts:
        sys.stderr.write(f"stopped: --set restarts={config.restarts} are used up\n")
        raise SystemExit(1) from error
    sys.stderr.write(f"begins again (attempt {attempt + 1}) from the newest checkpoint\n")
    os.environ["NANOGLM_ATTEMPT"] = str(attempt)
    changes = {"resume": folder, "task": config.task, "cluster": config.cluster}
    given = {name: value for name, value in changes.items() if value != getattr(Config, name)}
    os.execv(sys.executable, [sys.executable, sys.argv[0], *words(given)])


def fail(error: Exception | str) -> None:
    """Print one line to stderr and end the process with exit code 2."""
    text = printable(" ".join(str(error).split()))
    sys.stderr.write(f"{Path(sys.argv[0]).name}: {text}\n")
    raise SystemExit(2)


def printable(text: str) -> str:
    """Text with every control character but the end of a line escaped: a terminal obeys others."""
    return "".join([c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text])


def open_streams() -> None:
    """A terminal that cannot print a character prints its number."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
