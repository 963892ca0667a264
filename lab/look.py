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
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import losses
from fast.batches import pack
from lab.plots import column, grouped
from learner import Learner, tokens_of
from logprobs import token_logprobs
from reward import task_of
from runtime.config import Config, TrainingStopped, UserError, blame, flag, parse, require
from runtime.folder import read_lines, write_file
from runtime.messages import Trajectory
from runtime.pictures import score_curves
from runtime.replay import played_again, recorded

PAGE = Path(__file__).with_name("look.html")
USUAL, MOST = 25_000, 70_000  # tokens in a page: about 1 MB, at most 3.5 MB
SPANS, STEPS = 8_000, 3_000  # bars of a kind, and points: more than a screen has dots, 1.5 MB
FACTS = ("behaviour", "logprobs", "advantages", "entropy")
SETTINGS = ("task", "objective", "advantage", "credit", "max_staleness", "group_size")
METRICS = ("reward", "entropy", "clipped", "capped", "ratio_max", "staleness_max")
MOMENTS = ("admit", "start", "finish", "score", "scored", "train", "trained")


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
    named = ["--run"] if words and not words[0].startswith("-") else []
    said = "bench.py look RUN writes RUN/look.html: a run, token by token"
    asked = parse(said, named + words, LookConfig)
    require(asked.run, "look: must be given a run folder, as in look runs/NAME")
    try:
        config, *script = recorded(Config(replay=asked.run, task=asked.task or Config.task))
    except UserError as error:
        raise UserError(str(error).replace("--replay", "look", 1)) from error
    page = look_into(config, script, asked.groups)
    path = Path(asked.run, "look.html")
    text = PAGE.read_text().replace("{{run}}", to_json(page))
    with blame(f"look {asked.run}: must be writable", OSError):
        write_file(path, text.encode())
    shown = f"{len(page['groups']):,} of {page['run']['groups']:,} groups token by token"
    said = f"{path}: {len(text) / 1e6:.2f} MB, {shown}"
    if page["trouble"]:
        raise TrainingStopped(f"{page['trouble']}; {said}")
    return said


def to_json(page: dict) -> str:
    """A page's facts as JSON that no text of a model or a task can leave: `<` is escaped."""
    return json.dumps(page, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def look_into(config: Config, script: list, groups: int) -> dict:
    """All that the page shows."""
    run, task = Path(config.replay), task_of(config)
    _, steps, scores = script
    events, rows = read_lines(run / "events.jsonl"), read_lines(run / "metrics.jsonl")
    lives, wanted = lives_of(events), choose(steps, scores, groups)
    shown, room, trouble = [], MOST, ""
    try:
        for learner, event, batch in played_again(config, *script):
            own = [group for group in batch if group.group_id in wanted]
            if own:
                known, times = facts_of(learner, batch, own, config)
            for group in own:
                episodes = []
                # as logged: a replay passes through more versions than the worker had
                swaps = scores[group.group_id]["swaps"]
                for t, pairs in zip(group.trajectories, swaps, strict=True):
                    room -= len(t.tokens)
                    episode = episode_of(t, known.get(t.key) if room >= 0 else None)
                    episodes.append(episode | {"swaps": pairs, "times": times[t.key]})
                facts = {
                    "group": group.group_id,
                    "version": event["version"],
                    "task": group.problem.get("task", task.name),
                    "life": lives[group.group_id],
                    "episodes": episodes,
                }
                shown.append(facts)
    except TrainingStopped as error:
        trouble = str(error)
    ids = {i for group in shown for one in group["episodes"] for i in one.get("tokens", ())}
    texts = {i: task.tokenizer.decode_bytes([i]).decode(errors="replace") for i in sorted(ids)}
    facts = {name: getattr(config, name) for name in SETTINGS}
    facts |= {"name": run.resolve().name, "seconds": events[-1]["t"]}
    return {
        "run": facts | {"steps": len(steps), "groups": len(scores)},
        "trouble": trouble,
        "curves": curves_of(rows),
        "steps": steps_of(rows, steps, lives),
        "spans": spans_of(events),
        "groups": shown,
        "texts": texts,
    }


def choose(steps: list[dict], scores: dict, groups: int) -> set[int]:
    """The groups whose tokens are shown: spread evenly over all that were trained; as many as asked
    for (0: a usual number), or as fit into a page, at least one."""
    every = [group_id for step in steps for group_id in step["groups"]]
    tokens = max(1, sum(sum(scores[group_id]["lengths"]) for group_id in every))
    usual, most = (len(every) * size // tokens for size in (USUAL, MOST))
    count = min(max(1, min(groups or usual, most)), len(every))
    return {every[int((i + 0.5) * len(every) / count)] for i in range(count)}


# ----------------------------------------------------------------------------------- tokens


@torch.no_grad()
def facts_of(learner: Learner, batch: list, own: list, config: Config) -> tuple[dict, Counter]:
    """What the learner makes of some groups of its batch before the step: of each episode, by key,
    a row [M] for each of FACTS, for `clipped` and `capped`; and how often each is trained."""
    # of the whole batch: its rewards may be compared
    samples, _ = learner.method.samples(learner, batch, config)
    times, ids = Counter(t.key for t, _ in samples), {group.group_id for group in own}
    samples = [*{t.key: (t, credit) for t, credit in samples if t.group_id in ids}.values()]
    found = {}
    for indices in pack([len(t.tokens) for t, _ in samples], config.token_budget):
        part = [samples[i] for i in indices]
        logprobs, entropy, hidden = token_logprobs(learner.model, part, learner, config)
        tokens = tokens_of(learner, part, logprobs)
        advantages, _ = learner.method.advantages(part, tokens, hidden)
        tokens = tokens._replace(advantages=advantages)
        _, touched = losses.policy_loss(config.objective, tokens, 1)
        known = tokens.behaviour, tokens.logprobs, tokens.advantages, entropy, *touched.values()
        rows = torch.stack([x.float() for x in known]).cpu()
        pieces = rows.split([t.generated for t, _ in part], dim=1)
        found |= {t.key: piece for (t, _), piece in zip(part, pieces, strict=True)}
    return found, times


def episode_of(t: Trajectory, facts: Tensor | None) -> dict:
    """An episode as the page has it; without its tokens where nothing is known of them."""
    episode = {"finish": t.finish, "reward": short(t.reward), "length": len(t.tokens)}
    if facts is None:
        return episode
    *known, clipped, capped = facts.tolist()
    rows = [[short(x) for x in row] for row in known]
    return episode | {
        "turns": t.turns,
        "turn_rewards": [short(x) for x in t.turn_rewards],
        "tokens": t.tokens.tolist(),
        "versions": t.versions[t.loss_mask].tolist(),
        "clipped": np.flatnonzero(clipped).tolist(),  # which of the M
        "capped": np.flatnonzero(capped).tolist(),
        **dict(zip(FACTS, rows, strict=True)),
    }


def short(x: float | None) -> float | None:
    """Four digits of a number; None where there is none."""
    return float(f"{x:.4g}") if x is not None and math.isfinite(x) else None


# ------------------------------------------------------------------------------------- logs


def lives_of(events: list[dict]) -> dict[int, dict]:
    """MOMENTS of each group, in seconds of the run, and who worked on it; of a group that was
    issued again the last time counts."""
    lives = {}
    for event in events:
        at, end = event["t"], round(event["t"] + event.get("seconds", 0.0), 6)
        match event["kind"]:
            case "admit" | "requeue" as kind:
                life = {"again": kind == "requeue", "admit": at, "worker": event["worker"]}
                lives[event["group"]] = life
            case "start" | "finish" as kind:
                lives[event["group"]][kind] = at
            case "score":
                life = {"score": at, "scored": end, "judge": event["process"]}
                lives[event["group"]] |= life
            case "train":
                for group_id in event["groups"]:
                    lives[group_id] |= {"train": at, "trained": end}
    return lives


def curves_of(rows: list[dict]) -> list[dict]:
    """Training reward and held-out score by step, of each task."""
    found = []
    for name, (own, values) in score_curves(rows).items():
        y = [short(value) for value in thinned(values)]
        curve = {"name": name, "exam": name.endswith("solved")}
        found.append(curve | {"x": column(thinned(own), "step"), "y": y})
    return found


def steps_of(rows: list[dict], steps: list[dict], lives: dict) -> list[dict]:
    """What a step says of itself, and seconds from moment to moment of its groups, on average."""
    metrics = {row["step"]: row for row in rows if "reward" in row}
    found = []
    for event in thinned(steps):
        row = metrics.get(event["version"] + 1, {})
        own = [lives[group_id] for group_id in event["groups"]]
        means = [np.mean(column(own, moment)) for moment in MOMENTS]
        facts = {"step": event["version"] + 1, "t": event["t"], "seconds": short(event["seconds"])}
        facts["waits"] = [short(x) for x in np.diff(means)]
        found.append(facts | {name: short(row.get(name)) for name in METRICS})
    return found


def thinned(rows: list) -> list:
    """At most STEPS of many rows, evenly."""
    return rows[:: max(1, math.ceil(len(rows) / STEPS))]


def spans_of(events: list[dict]) -> dict[str, list]:
    """Of each process [begin, seconds, kind, version, how many] of all it did; what lies so close
    together that nobody could see it apart is one span."""
    silent = ("admit", "requeue", "start", "finish")  # of one group: they are in its life
    events = [event for event in events if event["kind"] not in silent]
    found = {process: [] for process in sorted(grouped(events, "process"))}
    tick = max(column(events, "t")) * len(found) / SPANS
    last = {}
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
