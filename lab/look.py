"""lab/look.py: a finished asynchronous run as one page to look into, token by token.

    python bench.py look runs/NAME               # writes runs/NAME/look.html
    python bench.py look runs/NAME --groups 500  # tokens of more groups

Learning curve and timeline are drawn from the run's logs. What the learner made of each token is in
no log: the run is played again (replay.py), and before each step the learner is asked about the
groups that the page shows. So training pays nothing for it. Facts go into lab/look.html as JSON;
the page loads nothing from anywhere.
Left out: the page itself, which is HTML and JavaScript by hand.

Axes: M generated tokens
"""

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import losses
from buffer import pack
from lab.replay import played_again, read_script, recorded
from learner import Learner, samples_of, tokens_of
from runtime.config import Config, TrainingStopped, UserError, blame, flag, parse, require
from runtime.folder import read_lines, write_file
from runtime.messages import Trajectory
from runtime.setup import task_of
from runtime.tokenizer import Tokenizer

PAGE = Path(__file__).with_name("look.html")
USUAL, MOST = 25_000, 90_000  # tokens in a page: about 1 MB, at most 4.5 MB
SPANS, STEPS = 10_000, 4_000  # bars and points in a page: a screen has fewer dots
SHOWN = "reward entropy clipped capped ratio_max ess staleness_mean staleness_max lr grad_norm"
SHOWN = SHOWN.split()  # metrics of a step
SILENT = ("admit", "requeue", "start", "finish")  # events of one group: they are in its life


@dataclass(frozen=True)
class LookConfig:
    """What to look into."""

    run: str = flag("", "run folder of train_async.py")
    groups: int = flag(0, "groups to show token by token (0: as many as make about 1 MB)", 0)
    task: str = flag("", "the run's task, if that is a file of your own: its code is run")


def look(words: list[str]) -> str:
    """Write look.html into a run folder; returns a line that says so.

    UserError where the run cannot be played again. Where it comes out otherwise than its log says
    (on another processor), the page has tokens up to there, and TrainingStopped is raised.
    """
    begin, first = time.monotonic(), words[:1]
    if first and not first[0].startswith("-"):
        words = ["--run", *words]
    asked = parse("look into a run: RUN, or --run RUN", words, LookConfig)
    require(asked.run, "look: must be given a run folder, as in look runs/NAME")
    run = Path(asked.run)
    try:
        config = Config(replay=asked.run, task=asked.task or Config.task)
        config, summary = recorded(config)
    except UserError as error:
        raise UserError(str(error).replace("--replay", "look", 1)) from error
    page, trouble = look_into(run, config, summary, asked.groups)
    text = PAGE.read_text().replace("{{run}}", to_json(page))
    with blame(f"look {run}: must be writable", OSError):
        write_file(run / "look.html", text.encode())
    shown = f"{len(page['groups']):,} of {page['run']['groups']:,} groups token by token"
    seconds = time.monotonic() - begin
    said = f"{run}/look.html: {len(text) / 1e6:.2f} MB, {shown}, {seconds:.0f} s"
    if trouble:
        raise TrainingStopped(f"{trouble}; {said}")
    return said


def to_json(page: dict) -> str:
    """A page's facts as JSON that no text of a model or a task can leave: `<` is escaped."""
    return json.dumps(page, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def look_into(run: Path, config: Config, summary: dict, groups: int) -> tuple[dict, str]:
    """All that the page shows, and what has stopped the replay ("": nothing)."""
    steps, scores = read_script(run)
    wanted = choose(steps, scores, groups)
    shown, room, trouble = {}, MOST, ""
    try:
        for learner, event, batch in played_again(config, summary, steps, scores):
            own = {group.group_id: group for group in batch if group.group_id in wanted}
            facts, times = facts_of(learner, batch, own, config) if own else ({}, {})
            for group_id, group in own.items():
                episodes = []
                swaps = scores[group_id]["swaps"]  # a replay passes through more versions
                for t, pairs in zip(group.trajectories, swaps, strict=True):
                    room -= len(t.tokens)
                    known = facts.get(t.key) if room >= 0 else None
                    episodes.append(episode_of(t, known, times[t.key]) | {"swaps": pairs})
                shown[group_id] = {"group": group_id, "version": event["version"]}
                shown[group_id] |= {"episodes": episodes}
    except TrainingStopped as error:
        trouble = str(error)
    events, rows = read_lines(run / "events.jsonl"), read_lines(run / "metrics.jsonl")
    lives = lives_of(events)
    task = task_of(config)
    names = [part.name for part in task.parts] or [task.name]
    for group_id, group in shown.items():
        group |= {"life": lives[group_id], "task": names[part_number(group_id, task.shares)]}
    facts = {
        "name": run.resolve().name,
        "task": config.task,
        "objective": config.objective,
        "advantage": config.advantage,
        "credit": config.credit,
        "bound": config.max_staleness,
        "seconds": events[-1]["t"],
        "steps": len(steps),
        "groups": len(scores),
        "group_size": config.group_size,
    }
    page = {
        "run": facts,
        "trouble": trouble,
        "curves": curves_of(rows),
        "steps": steps_of(rows, steps, lives),
        "spans": spans_of(events),
        "groups": list(shown.values()),
        "texts": texts_of(shown, task.tokenizer),
    }
    return page, trouble


def choose(steps: list[dict], scores: dict, groups: int) -> set[int]:
    """The groups whose tokens are shown: spread evenly over all that were trained; as many as asked
    for (0: a usual number), or as fit into a page, at least one."""
    every = [group_id for step in steps for group_id in step["groups"]]
    size = sum(sum(scores[group_id]["lengths"]) for group_id in every) / max(1, len(every))
    most = MOST / max(1.0, size)
    count = min(len(every), max(1, int(min(groups or USUAL / max(1.0, size), most))))
    return {every[int((i + 0.5) * len(every) / count)] for i in range(count)}


# ----------------------------------------------------------------------------------- tokens


@torch.no_grad()
def facts_of(learner: Learner, batch: list, own: dict, config: Config) -> tuple[dict, Counter]:
    """What the learner makes of the groups `own` of a batch before its step: of each episode, by
    its key, a row of numbers for each of FACTS [6, M]; and how often each is trained."""
    samples, _ = samples_of(batch, config)  # of the whole batch: its rewards may be compared
    times = Counter(t.key for t, _ in samples)
    samples = [*{t.key: (t, credit) for t, credit in samples if t.group_id in own}.values()]
    found = {}
    for indices in pack([len(t.tokens) for t, _ in samples], config.token_budget):
        part = [samples[i] for i in indices]
        tokens, entropy, _ = tokens_of(learner, part, config)
        _, touched = losses.policy_loss(config.objective, tokens, 1)
        known = tokens.behaviour, tokens.logprobs, tokens.advantages, entropy, *touched.values()
        rows = torch.stack([x.float() for x in known]).cpu()
        pieces = rows.split([t.generated for t, _ in part], dim=1)
        found |= {t.key: piece for (t, _), piece in zip(part, pieces, strict=True)}
    return found, times


def episode_of(t: Trajectory, facts: Tensor | None, times: int) -> dict:
    """An episode as the page has it; without its tokens where nothing is known of them."""
    episode = {"finish": t.finish, "reward": short(t.reward), "times": times}
    episode |= {
        "turn_rewards": [short(reward) for reward in t.turn_rewards],
        "length": len(t.tokens),
    }
    if facts is None:
        return episode
    behaviour, logprobs, advantages, entropy, clipped, capped = facts.tolist()
    return episode | {
        "turns": t.turns,
        "tokens": t.tokens.tolist(),
        "versions": t.versions[t.loss_mask].tolist(),
        "behaviour": [short(x) for x in behaviour],
        "logprobs": [short(x) for x in logprobs],
        "advantages": [short(x) for x in advantages],
        "entropy": [short(x) for x in entropy],
        "clipped": np.flatnonzero(clipped).tolist(),
        "capped": np.flatnonzero(capped).tolist(),
    }


def short(x: float | None) -> float | None:
    """Four digits of a number; None where there is none."""
    return float(f"{x:.4g}") if x is not None and math.isfinite(x) else None


def texts_of(shown: dict, tokenizer: Tokenizer) -> dict[int, str]:
    """The text of every token id in the page."""
    episodes = [episode for group in shown.values() for episode in group["episodes"]]
    ids = {token for episode in episodes for token in episode.get("tokens", ())}
    return {i: tokenizer.decode_bytes([i]).decode(errors="replace") for i in sorted(ids)}


# ------------------------------------------------------------------------------------- logs


def part_number(group_id: int, shares: Sequence) -> int:
    """The task of a group, where there are several."""
    return group_id % len(shares)


def lives_of(events: list[dict]) -> dict[int, dict]:
    """When each group was admitted, started, generated, verified, trained, in seconds of the run,
    and by whom; of a group that was issued again the last time counts."""
    lives = {}
    for event in events:
        kind, at = event["kind"], event["t"]
        end = round(at + event.get("seconds", 0.0), 6)
        match kind:
            case "admit" | "requeue":
                again = kind == "requeue"
                lives[event["group"]] = {"admit": at, "worker": event["worker"], "again": again}
            case "start" | "finish":
                lives[event["group"]][kind] = at
            case "score":
                own = {"score": at, "scored": end, "judge": event["process"]}
                lives[event["group"]] |= own
            case "train":
                for group_id in event["groups"]:
                    lives[group_id] |= {"train": at, "trained": end}
    return lives


def curves_of(rows: list[dict]) -> list[dict]:
    """Training reward and held-out score by step, of each task."""
    steps = thinned([row for row in rows if "reward" in row])
    exams = thinned([row for row in rows if "eval" in row])
    found = []
    for name in exams[0]["eval"].get("tasks", [""]) if exams else [""]:
        own = [row["tasks"][name] if name else row for row in steps]
        held = [row["eval"]["tasks"][name] if name else row["eval"] for row in exams]
        for kind, at, values in (
            ("training reward", steps, [row["reward"] for row in own]),
            ("held-out, solved", exams, [row["solved"] for row in held]),
        ):
            x, y = [row["step"] for row in at], [short(value) for value in values]
            found.append({"name": f"{name} {kind}".strip(), "exam": at is exams, "x": x, "y": y})
    return found


def steps_of(rows: list[dict], steps: list[dict], lives: dict) -> list[dict]:
    """What a step says of itself, and how long its groups waited on average, in seconds."""
    metrics = {row["step"]: row for row in rows if "reward" in row}
    found = []
    for event in thinned(steps):
        row = metrics.get(event["version"] + 1, {})
        own = [lives[group_id] for group_id in event["groups"]]
        moments = ("admit", "start", "finish", "score", "scored", "train", "trained")
        means = [sum(life[moment] for life in own) / len(own) for moment in moments]
        facts = {name: short(row.get(name)) for name in SHOWN}
        facts |= {"step": event["version"] + 1, "t": round(event["t"], 4)}
        facts |= {"seconds": short(event["seconds"]), "waits": [short(x) for x in np.diff(means)]}
        found.append(facts)
    return found


def thinned(rows: list) -> list:
    """At most about STEPS of many rows, evenly."""
    return rows[:: 1 + len(rows) // STEPS]


def spans_of(events: list[dict]) -> dict[str, list]:
    """Of each process [begin, seconds, kind, version, how many] of all it did; what lies so close
    together that nobody could see it apart is one span."""
    events = [event for event in events if event["kind"] not in SILENT]
    processes = sorted({event["process"] for event in events})
    end = max([event["t"] for event in events], default=0.0)
    tick = end * len(processes) / SPANS
    found, last = {process: [] for process in processes}, {}
    for event in sorted(events, key=lambda event: event["t"]):
        begin, seconds = event["t"], event.get("seconds", 0.0)
        place = event["process"], event["kind"]
        span = last.get(place)
        if span and begin + seconds - span[0] < tick:
            span[1] = max(span[1], round(begin + seconds - span[0], 4))
            span[4] += 1
        else:
            span = [round(begin, 4), round(seconds, 4), event["kind"], event.get("version"), 1]
            found[event["process"]].append(span)
            last[place] = span
    return found
