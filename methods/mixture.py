"""methods/mixture.py: several tasks in one run, as one ordinary task.

    python train_async.py --task guess,sum --ratio 3,1

A fixed pattern says which task a prompt belongs to, so shares are exact over what is admitted. A
problem names its task; limits of its turns travel with it. What differs between the tasks beyond
that is taken together: the policy may emit any of their tokens.
"""

from reward import Step, Task, TaskError, alphabet_of


def mixture_of(tasks: list[Task], ratio: str) -> Task:
    """One task that takes turns by a ratio, such as "3,1" ("": alike); TaskError."""
    names = [task.name for task in tasks]
    if len({*names}) < len(names):
        raise TaskError(f"--task {','.join(names)}: must name each task once")
    shares = shares_of(ratio, names)
    pattern = pattern_of(shares)
    held_out = [(k, i) for k, task in enumerate(tasks) for i in range(task.eval_size)]
    by_name = dict(zip(names, tasks, strict=True))

    def reset(index: int, split: str) -> dict:
        if split == "eval":
            k, index = held_out[index]
        else:
            cycle, turn = divmod(index, len(pattern))
            k = pattern[turn]
            index = cycle * shares[k] + pattern[:turn].count(k)
        task = tasks[k]
        limits = {"turn_tokens": task.turn_tokens, "max_turns": task.max_turns}
        facts = {"_task": task.name, "_solved": task.solved, "_ends": bool(task.stop)}
        return limits | task.reset(index, split) | facts

    def step(problem: dict, answers: list) -> Step:
        return by_name[problem["_task"]].step(problem, answers)

    def open_episode(problem: dict) -> dict:
        task = by_name[problem["_task"]]
        state = task.open(problem) if task.open else []  # without a state: the answers so far
        return {"task": task, "problem": problem, "state": state}

    def step_episode(episode: dict, answer: str) -> Step:
        task, state = episode["task"], episode["state"]
        if task.open:
            return task.step(state, answer)
        state.append(answer)
        return task.step(episode["problem"], list(state))

    def close_episode(episode: dict) -> None:
        if episode["task"].open:
            episode["task"].close(episode["state"])

    stateful = any(task.open for task in tasks)
    return Task(
        reset,
        step_episode if stateful else step,
        alphabet=tuple(sorted({i for task in tasks for i in alphabet_of(task).tolist()})),
        max_prompt_tokens=max(task.max_prompt_tokens for task in tasks),
        turn_tokens=max(task.turn_tokens for task in tasks),
        max_turns=max(task.max_turns for task in tasks),
        stop=frozenset().union(*(task.stop for task in tasks)),
        observation_tokens=max(task.observation_tokens for task in tasks),
        eval_size=len(held_out),
        # until each has had as many groups as alone
        steps=max(-(-t.steps * len(pattern) // n) for n, t in zip(shares, tasks, strict=True)),
        open=open_episode if stateful else None,
        close=close_episode,
        outside=any(task.outside for task in tasks),
        solve=lambda problem: by_name[problem["_task"]].solve(problem),
        name=",".join(names),
        tokenizer=tasks[0].tokenizer,
        longest=max(task.context for task in tasks),
    )


def shares_of(ratio: str, names: list[str]) -> list[int]:
    """The numbers of a ratio; TaskError."""
    parts = ratio.split(",") if ratio else ["1"] * len(names)
    if len(parts) != len(names) or not all(x.isascii() and x.isdigit() and int(x) for x in parts):
        must = f"must be {len(names)} whole numbers from 1 up, one for each of {','.join(names)}"
        raise TaskError(f"--ratio {ratio}: {must}")
    return [int(x) for x in parts]


def pattern_of(shares: list[int]) -> list[int]:
    """Which task is next, as evenly as whole numbers allow: 3,1 gives 0, 0, 1, 0."""
    credit, pattern = [0] * len(shares), []
    for _ in range(sum(shares)):
        credit = [have + n for have, n in zip(credit, shares, strict=True)]
        pattern.append(credit.index(max(credit)))
        credit[pattern[-1]] -= sum(shares)
    return pattern
