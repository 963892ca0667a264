"""The house rules, measured: acyclic imports, code lines and width of every room."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CEILINGS = {
    "common": 244,
    "dsa": 220,
    "dsa_triton": 480,
    "pretrain": 200,
    "recipe": 230,
    "model": 280,
    "cache": 150,
    "reward": 320,
    "buffer": 250,
    "losses": 240,
    "rollout": 328,
    "transport": 280,
    "learner": 200,
    "checkpoint": 90,
    "limits": 60,
    "weight_mailbox": 82,
    "workers": 90,
    "speed": 285,
    "train_sync": 240,
    "train_async": 300,
    "ledger": 180,
    "replay": 120,
    "report": 245,
    "pipeline": 288,
    "calibrate": 155,
    "simulate": 224,
    "compare": 202,
    "bench": 161,
    "tables": 288,
    "lab": 220,
    "lab_pipeline": 105,
}
TOTAL, TOKENS_PER_LINE = 6395, 17.0
ROOMS = sorted(p.stem for p in ROOT.glob("*.py"))


def code_lines(source: str) -> tuple[int, int]:
    """(lines with code, tokens), without blanks, comments and docstrings."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    silent |= {tokenize.ENDMARKER}
    lines, tokens = set(), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent and token.start[0] not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
            tokens += 1
    return len(lines), tokens


def imports(room: str) -> set[str]:
    """Rooms that a room imports, lazily or not."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / f"{room}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found & set(ROOMS)


def test_imports_are_acyclic():
    done: set[str] = set()

    def visit(room: str, path: tuple):
        assert room not in path, f"import cycle: {' -> '.join((*path, room))}"
        if room not in done:
            for other in imports(room) - {room}:
                visit(other, (*path, room))
            done.add(room)

    for room in ROOMS:
        visit(room, ())


def test_the_asynchronous_trainer_imports_the_synchronous_step():
    assert "train_sync" in imports("train_async")
    assert "train_async" not in imports("train_sync")
    assert "transport" not in imports("train_sync")


@pytest.mark.parametrize("room", ROOMS)
def test_room_stays_below_its_ceiling(room):
    source = (ROOT / f"{room}.py").read_text()
    lines, tokens = code_lines(source)
    assert lines <= CEILINGS[room], f"{room}.py: {lines} code lines, ceiling {CEILINGS[room]}"
    # long lines do not make a file smaller: see also the column limit in pyproject.toml
    assert tokens / lines <= TOKENS_PER_LINE, f"{room}.py: {tokens / lines:.1f} tokens a line"
    assert max(map(len, source.splitlines())) <= 100


def test_total_size():
    total = sum(code_lines((ROOT / f"{room}.py").read_text())[0] for room in ROOMS)
    assert total <= TOTAL


if __name__ == "__main__":  # the size meter
    for name in ROOMS:
        count, tokens = code_lines((ROOT / f"{name}.py").read_text())
        print(
            f"{name:12} {count:5} of {CEILINGS.get(name, 0):4}  {tokens / count:5.1f} tokens/line"
        )
