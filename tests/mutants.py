"""Does a test notice when an agent is wrong? `make test-mutants` breaks monobeast.py in one place after the other, and
then R2D2: r2d2.py, its replay and its arithmetic.

    python tests/mutants.py                      # all of them, in about five minutes
    python tests/mutants.py entropy "core state" # those whose names contain one of these

Each mutant is a copy of the agents with one piece of text replaced, and the tests run on it until the first one fails.
Prints which test that was. The exit status is 1 if a mutant survives, and if a text does not occur exactly once, which
means that its file has changed: then change the mutant with it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.pop(0)  # this folder, which a mutant has its own of

import gymnasium  # noqa: E402, F401  what every mutant imports, once
import torch._dynamo  # noqa: E402, F401

ROOT = Path(__file__).resolve().parent.parent
TESTS = {  # of each file, the quickest first
    "monobeast.py": ["tests/test_update.py", "tests/test_net.py", "tests/test_loss.py"],
    "beast/learn/replay.py": ["tests/test_replay.py"],
    "beast/learn/qlearning.py": ["tests/test_r2d2.py"],
    "r2d2.py": ["tests/test_r2d2.py"],
}
SLOW = "learned or crash or killed or a_second or every_checkpoint or films or atari or its_ratio or prepared"


class Mutant(NamedTuple):
    name: str
    old: str
    new: str
    file: str = "monobeast.py"


MUTANTS = [
    # V-trace's inputs
    Mutant(
        "end of unroll not bootstrapped in the targets",
        "bootstrap_value=values[-1].detach(),",
        "bootstrap_value=torch.zeros_like(values[-1]),",
    ),
    Mutant(
        "end of unroll not bootstrapped in the advantages",
        "torch.cat([vs[1:], values[-1:].detach()])",
        "torch.cat([vs[1:], torch.zeros_like(values[-1:])])",
    ),
    Mutant(
        "end of unroll bootstraps from the row before it",
        "bootstrap_value=values[-1].detach(),",
        "bootstrap_value=values[-2].detach(),",
    ),
    Mutant(
        "no off-policy correction of the targets", "log_rhos=log_rhos.detach()", "log_rhos=torch.zeros_like(log_rhos)"
    ),
    Mutant("--clip_rho ignored", "clip_rho_threshold=flags.clip_rho,", ""),
    Mutant("--vtrace_lambda ignored", "lambda_=flags.vtrace_lambda,", ""),
    Mutant("--discount ignored", 'batch["truncated"], flags.discount)', 'batch["truncated"], 0.99)'),
    Mutant(
        "truncation treated as termination",
        'transition_masks(batch["done"], batch["terminated"],',
        'transition_masks(batch["done"], batch["terminated"] | batch["truncated"],',
    ),
    Mutant(
        "termination bootstraps",
        'transition_masks(batch["done"], batch["terminated"], batch["truncated"],',
        'transition_masks(batch["done"], batch["done"] & False, batch["terminated"] | batch["truncated"],',
    ),
    Mutant(
        "values leak from one episode into the one before",
        "discounts=discounts,",
        "discounts=torch.full_like(discounts, flags.discount),",
    ),
    Mutant("void transitions in the targets", ".masked_fill(~mask, -torch.inf),", ","),
    Mutant("action of row t", 'batch["action"][1:],', 'batch["action"][:-1],'),
    Mutant("reward of row t", 'flags, batch["reward"][1:])', 'flags, batch["reward"][:-1])'),
    Mutant("behaviour logits of row t", 'batch["policy_logits"][1:]', 'batch["policy_logits"][:-1]'),
    Mutant(
        "net's logits of row t+1",
        "distribution(net.action_space, policy_logits[:-1])",
        "distribution(net.action_space, policy_logits[1:])",
    ),
    Mutant(
        "reward not clipped", 'scale_rewards(flags, batch["reward"][1:])', 'flags.reward_scale * batch["reward"][1:]'
    ),
    Mutant(
        "reward scaled and clipped twice",
        'scale_rewards(flags, batch["reward"][1:])',
        'scale_rewards(flags, scale_rewards(flags, batch["reward"][1:]))',
    ),
    Mutant(
        "reward clipped on one side",
        "rewards.clamp(-clip, clip)",
        "rewards.clamp(max=clip)",
    ),
    # final observations of same-step resets
    Mutant(
        "value of a final observation not discounted",
        "rewards + flags.discount * final_values(",
        "rewards + final_values(",
    ),
    Mutant(
        "termination bootstraps from its final observation",
        'batch["truncated"] & ~batch["terminated"])[1:]',
        'batch["truncated"])[1:]',
    ),
    Mutant(
        "final observation valued with the core state of the wrong row",
        "x[begin : t + 1]",
        "x[begin : max(t, begin + 1)]",
    ),
    Mutant(
        "final observation valued with the first core state", "_, _, core_state = net(map_tensors(", "net(map_tensors("
    ),
    Mutant("final observation taken for the first of an episode", ', "done": torch.zeros_like(last["done"])}', "}"),
    # the loss
    Mutant("void transitions trained", "weight = mask.float()", "weight = torch.ones_like(discounts)"),
    Mutant("count over all steps", "count = weight.sum().clamp(min=1)", "count = torch.ones_like(weight).sum()"),
    Mutant("count of a batch of void steps is 0", "count = weight.sum().clamp(min=1)", "count = weight.sum()"),
    Mutant("ratio of void steps is infinite", "torch.where(mask, log_rhos, 0).exp()", "log_rhos.exp()"),
    Mutant(
        "advantage statistics over void steps",
        "(advantages - mean(advantages)) / variance(advantages).sqrt()",
        "(advantages - advantages.mean()) / advantages.var(correction=0).sqrt()",
    ),
    Mutant("advantages divided by their variance", "variance(advantages).sqrt().clamp", "variance(advantages).clamp"),
    Mutant("--normalize_advantages ignored", "if flags.normalize_advantages:", "if True:"),
    Mutant("advantage not detached", " - values[:-1].detach()\n    weight", " - values[:-1]\n    weight"),
    Mutant(
        "bootstrap of the advantage not detached",
        "torch.cat([vs[1:], values[-1:].detach()])",
        "torch.cat([vs[1:], values[-1:]])",
    ),
    Mutant(
        "targets not detached",
        "value_loss = 0.5 * (((vs - values[:-1])",
        "value_loss = 0.5 * (((vs + discounts * (values[1:] - values[1:].detach()) - values[:-1])",
    ),
    Mutant(
        "ratio detached",
        "policy_gains = torch.minimum(ratio * advantages, clipped * advantages)",
        "policy_gains = torch.minimum(ratio * advantages, clipped * advantages).detach()",
    ),
    Mutant(
        "PPO clips on one side",
        "ratio.clamp(1 / (1 + flags.ppo_clip), 1 + flags.ppo_clip)",
        "ratio.clamp(max=1 + flags.ppo_clip)",
    ),
    Mutant("PPO clips at 1 - x", "ratio.clamp(1 / (1 + flags.ppo_clip), ", "ratio.clamp(1 - flags.ppo_clip, "),
    Mutant("PPO takes the larger surrogate", "torch.minimum(ratio * advantages", "torch.maximum(ratio * advantages"),
    Mutant("--clip_pg_rho ignored", "clamp(max=flags.clip_pg_rho)", "clamp(max=1.0)"),
    Mutant(
        "gradient through V-trace's weight",
        "ratio.detach().clamp(max=flags.clip_pg_rho)",
        "ratio.clamp(max=flags.clip_pg_rho)",
    ),
    Mutant(
        "policy gradient without V-trace's weight",
        "ratio.detach().clamp(max=flags.clip_pg_rho) * advantages",
        "advantages",
    ),
    Mutant("values learned in the rewards' unit", "(vs - values[:-1]) / unit)", "(vs - values[:-1]) / 1.0)"),
    Mutant("values learned in the returns' variance", "(vs - values[:-1]) / unit)", "(vs - values[:-1]) / unit**2)"),
    Mutant("value loss without its half", "value_loss = 0.5 *", "value_loss ="),
    Mutant("value cost dropped", "flags.baseline_cost * value_loss", "value_loss"),
    Mutant("entropy's sign", "- flags.entropy_cost * entropy", "+ flags.entropy_cost * entropy"),
    Mutant("policy loss's sign", "policy_loss = -(policy_gains", "policy_loss = (policy_gains"),
    Mutant("sum instead of mean", 'if flags.reduction == "mean":', "if False:"),
    Mutant("mean instead of sum", 'if flags.reduction == "mean":', "if True:"),
    Mutant(
        "rollouts begin with an empty core state",
        "policy_logits, values, _ = net(batch, core_state)",
        "policy_logits, values, _ = net(batch, tuple(torch.zeros_like(x) for x in core_state))",
    ),
    # the net
    Mutant(
        "core state not zeroed where an episode begins",
        "self.core(x, begins,",
        "self.core(x, begins & False,",
    ),
    Mutant("last reward not zeroed where an episode begins", "unsqueeze(-1).masked_fill(begins, 0)", "unsqueeze(-1)"),
    Mutant(
        "last action not zeroed where an episode begins",
        'inputs["action"]).masked_fill(begins, 0)',
        'inputs["action"])',
    ),
    Mutant(
        "image statistics updated in eval mode",
        "if self.training and torch.is_grad_enabled():",
        "if torch.is_grad_enabled():",
    ),
    Mutant(
        "image statistics updated without gradients",
        "if self.training and torch.is_grad_enabled():",
        "if self.training:",
    ),
    Mutant(
        "image statistics updated before the output",
        "        output = torch.addcmul(",
        "        self.observe(x[-1]) if self.training and torch.is_grad_enabled() else None\n"
        "        output = torch.addcmul(",
    ),
    Mutant("image statistics of the first row", "self.observe(x[-1] if", "self.observe(x[0] if"),
    Mutant("vector statistics of the last row only", "else x.flatten(0, 1))", "else x[-1])"),
    Mutant("vectors not clipped", "output.clamp(-10, 10).where(x.isfinite(), output)", "output"),
    Mutant("infinite vectors clipped", ".clamp(-10, 10).where(x.isfinite(), output)", ".clamp(-10, 10)"),
    Mutant("NaN in the statistics", ".where(x.abs() < 1e15, self.mean)", ""),
    Mutant("squares that overflow in the statistics", "x.abs() < 1e15", "x.isfinite()"),
    Mutant("rounding of large vectors scaled up", "+ self.floor + rounding)", "+ self.floor)"),
    Mutant("a bad epoch told by the numbers after it", "torch.where(is_bad, numbers[name], x)", "x"),
    Mutant("--normalize_observations ignored", "if flags.normalize_observations and np", "if np"),
    Mutant("weights of before the statistics get some", "                self.center = None", "                pass"),
    Mutant(
        "images of another shape lose their statistics", 'center.count", None) is None and', 'center.count", None) or'
    ),
    Mutant(
        "statistics count what was seen elsewhere", 'pop(f"{prefix}center.count", None)', 'get(f"{prefix}center.count")'
    ),
    Mutant("image statistics forget", "share = len(x) / (self.count + len(x))", "share = 1.0"),
    Mutant("values follow the returns' deviation", "self.weight *= old_deviation / self.deviation", "pass"),
    Mutant("values follow the returns' mean", "old_deviation + old_mean - self.mean)", "old_deviation)"),
    Mutant("returns of a bad update observed", "torch.where(is_bad, 0, self.RATE)", "torch.tensor(self.RATE)"),
    Mutant("mean of the returns not in their deviation", "square() + difference.square() * (1 - rate)", "square()"),
    Mutant("returns not observed", "if head := value_head(net):", "if False:"),
    # the update and its loops
    Mutant("gradient not clipped", "flags.grad_clip or math.inf)", "math.inf)"),
    Mutant("--grad_clip 0 stops learning", "flags.grad_clip or math.inf)", "flags.grad_clip)"),
    Mutant("bad update not skipped", "step_unless(optimizer, is_bad)", "optimizer.step()"),
    Mutant("loss not looked at", "~(loss.detach().isfinite() & norm.isfinite())", "~norm.isfinite()"),
    Mutant("gradient not looked at", "~(loss.detach().isfinite() & norm.isfinite())", "~loss.detach().isfinite()"),
    Mutant("--epochs ignored", "for _ in range(flags.epochs):", "for _ in range(1):"),
    Mutant("--minibatches ignored", "core_state, flags.minibatches)", "core_state, 1)"),
    Mutant(
        "minibatches with the core states of the batch",
        "compute_loss(flags, net, part, state)",
        "compute_loss(flags, net, part, core_state)",
    ),
    Mutant("--value_net ignored", "encode(self.value_encoders, self.value_join) if self.value_encoders else x", "x"),
    Mutant("--initial_std ignored", "math.log(flags.initial_std)", "0.0"),
    Mutant("bad epoch forgotten", "is_bad = is_bad | ~(", "is_bad = ~("),
    Mutant(
        "learning rate not decayed",
        'group["lr"] = learning_rate(flags, learner.steps)',
        'group["lr"] = flags.learning_rate',
    ),
    Mutant("learning rate below 0", "max(1 - steps / flags.total_steps, 0.0)", "1 - steps / flags.total_steps"),
    Mutant("--lr_decay none decays", 'if flags.lr_decay == "linear" else 1.0', ""),
    Mutant("gradients of all updates added up", "optimizer.zero_grad(set_to_none=True)", "pass"),
    Mutant(
        "core state of the wrong row",
        "rows.answer(action, policy_logits, baseline, version, core_state)",
        "rows.answer(action, policy_logits, baseline, version, rows.core_state)",
    ),
    Mutant("most probable action always", ".sample(training.generator)", ".mode()"),
    Mutant(
        "weights published under an old version",
        "weights.publish(learner.net, learner.updates)",
        "weights.publish(learner.net, learner.updates - 1)",
    ),
    Mutant("run never finished", "if training.finished():", "if False:"),
]
# R2D2: the replay, its arithmetic, the agent. Name, old and new text.
R2D2_MUTANTS = {
    "beast/learn/replay.py": [
        (
            "last observations not stored",
            'kept |= {name: field for name, field in fields.items() if name.startswith("final_obs/")}',
            "pass",
        ),
        (
            "uniform draws of the first group",
            "groups, blocks = np.nonzero(self.is_complete)",
            "groups, blocks = np.nonzero(self.is_complete[:1])",
        ),
        (
            "--replay_sequences without what is overwritten",
            "* self.stride + self.blocks_of_sequence + 1",
            "* self.stride",
        ),
        (
            "late priorities taken",
            "is_late = self.generation_of(ids) != generations",
            "is_late = np.zeros(len(ids), bool)",
        ),
        ("late priorities counted as bad", "(is_bad & ~is_late).sum()", "is_bad.sum()"),
        ("numbers of groups for those of environments", '("env_number", columns)', '("env_number", groups)'),
        ("importance weights of the wrong sign", "** -self.importance_exponent", "** self.importance_exponent"),
        ("sum over the left child", "targets -= np.where(right, left, 0)", "pass"),
        (
            "sequences across two lives",
            "self._life_began[group], self._life[group] = self._next_block[group], life",
            "self._life[group] = life",
        ),
        (
            "core's state of the next block",
            "kept[group, block % self.num_blocks]",
            "kept[group, (block + 1) % self.num_blocks]",
        ),
        (
            "what fills the replay counts for the ratio",
            "            self.filled += steps\n",
            "            self.filled += steps\n            self.steps += steps\n",
        ),
    ],
    "beast/learn/qlearning.py": [
        ("one reward too many", "for _ in range(n):", "for _ in range(n + 1):"),
        ("void transitions in the targets", "torch.where(mask, stepped, values[:-1])", "stepped"),
        ("rescaling without its linear part", "+ EPSILON * x", ""),
        ("priorities of void transitions", "errors.abs().where(mask, 0)", "errors.abs()"),
    ],
    "r2d2.py": [
        ("a row left out behind a truncation", "begin = t + 1\n", "begin = t + 2\n"),
        ("a row twice behind a truncation", "begin = t + 1\n", "begin = t\n"),
        ("its own target network", "flags, net, learner.target, sample.batch", "flags, net, net, sample.batch"),
        (
            "importance weights ignored",
            "sample.core_state, sample.weights, target_q",
            "sample.core_state, torch.ones_like(sample.weights), target_q",
        ),
        (
            "generations of now",
            "replay.update(sample.ids, sample.generations,",
            "replay.update(sample.ids, replay.generation_of(sample.ids),",
        ),
        (
            "columns that evaluate in the ratio",
            "limiter.add(int(counts[:, : replay.width].sum()))",
            "limiter.add(int(counts.sum()))",
        ),
        (
            "steps without the columns that evaluate",
            "learner.steps += int(counts.sum())",
            "learner.steps += int(counts[:, : replay.width].sum())",
        ),
        ("--epsilon ignored by a test", '"atari_backend", "epsilon")}', '"atari_backend")}'),
        ("last action never explored", "torch.randint(q.shape[2],", "torch.randint(q.shape[2] - 1,"),
        (
            "one coin for a group",
            "coin = torch.rand(epsilon.shape, generator=generator, device=q.device)",
            "coin = torch.rand((), generator=generator, device=q.device)",
        ),
        (
            "one draw for a group",
            "drawn = torch.randint(q.shape[2], epsilon.shape, generator",
            "drawn = torch.randint(q.shape[2], (1,), generator",
        ),
        ("returns not resumed", 'self.all_returns = state["all_returns"]', "pass"),
        (
            "last columns stored",
            "columns(rollout, 0, replay.width)",
            "columns(rollout, rollout['done'].shape[1] - replay.width, rollout['done'].shape[1])",
        ),
        (
            "states of the last columns stored",
            "tuple(x[:, : replay.width] for x in core_state)",
            "tuple(x[:, -replay.width :] for x in core_state)",
        ),
        (
            "ratio of the flags in the metrics",
            '"stats/replay_ratio": limiter.measured()',
            '"stats/replay_ratio": flags.replay_ratio',
        ),
        ("--grad_clip 0 stops learning", "flags.grad_clip or math.inf)", "flags.grad_clip)"),
        (
            "update from an empty replay",
            "limiter.may_update() and replay.num_sequences() and",
            "limiter.may_update() and",
        ),
        ("replay of a remote run bounded", 'flags.save_replay or flags.feed == "remote"', "flags.save_replay"),
        ("replay of a saved run bounded", 'flags.save_replay or flags.feed == "remote"', 'flags.feed == "remote"'),
        ("signed errors", '"losses/td_error": errors.abs().sum()', '"losses/td_error": errors.sum()'),
        (
            "returns of the columns that count",
            "finished_episodes(numpy_rows)]",
            "finished_episodes({name: x[:, -1:] for name, x in numpy_rows.items()})]",
        ),
        (
            "no double Q-learning",
            "target_q.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1)",
            "target_q.amax(-1)",
        ),
        (
            "action of row t",
            'rows["action"][1:].unsqueeze(-1)).squeeze(-1)  #',
            'rows["action"][:-1].unsqueeze(-1)).squeeze(-1)  #',
        ),
        ("target network never copied", "self.target.load_state_dict(self.net.state_dict())", "pass"),
        ("bad update not skipped", "step_unless(optimizer, is_bad)", "optimizer.step()"),
    ],
}
MUTANTS += [
    Mutant(f"{Path(file).stem}: {name}", old, new, file)
    for file, mutants in R2D2_MUTANTS.items()
    for name, old, new in mutants
]


class Run:
    """The tests on a mutant, or on the files as they are, in a child process that finds torch already imported."""

    def __init__(self, tests: list[str], mutant: Mutant | None = None):
        self.mutant, self.began = mutant, time.monotonic()
        self.place = tempfile.TemporaryDirectory()
        place = Path(self.place.name)
        for folder in ("beast", "benchmarks", "tests"):
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / folder, place / folder, ignore=ignored)
        for name in ("monobeast.py", "polybeast.py", "r2d2.py", "pyproject.toml"):
            shutil.copy(ROOT / name, place)
        if mutant:
            (place / mutant.file).write_text((ROOT / mutant.file).read_text().replace(mutant.old, mutant.new))
        self.pid = os.fork()
        if self.pid == 0:
            os.chdir(place)
            output = os.open("output", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1), os.dup2(output, 2)
            chosen = ["-m", "not long and not on_demand", "-k", f"not ({SLOW})"]
            code = pytest.main(["-x", "-q", "--tb=short", "-p", "no:cacheprovider", *chosen, *tests])
            sys.stdout.flush()
            os._exit(code)

    def end(self, status: int) -> tuple[str, float]:
        """The first test that failed, "" if none did, and the seconds that it took."""
        output = Path(self.place.name, "output").read_text()
        self.place.cleanup()
        failed = re.search(r"^FAILED tests/([\w.]+::\w+)", output, re.MULTILINE)
        if status != 0 and not failed:  # what cannot even be imported says nothing about the tests
            raise RuntimeError(f"{self.mutant or 'no mutant'}: no test has failed, but pytest:\n{output}")
        return failed[1] if failed else "", time.monotonic() - self.began


def main() -> None:
    words = sys.argv[1:]
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    found = [(mutant, (ROOT / mutant.file).read_text().count(mutant.old)) for mutant in chosen]
    stale = [f"{m.file}: {m.name} ({count} times): {m.old}" for m, count in found if count != 1]
    if stale:
        problem = (
            f"These texts do not occur exactly once in their files, which have changed; change {__file__} with them:"
        )
        sys.exit("\n".join([problem, *stale]))
    used = {test for mutant in chosen for test in TESTS[mutant.file]}
    as_it_is = Run(sorted(used))
    failed, _ = as_it_is.end(os.waitpid(as_it_is.pid, 0)[1])
    if failed:
        sys.exit(f"{failed} fails without a mutant: mend that first.")
    print("| mutant | killed by | seconds |\n|---|---|---|", flush=True)
    waiting, running, survivors = chosen[::-1], {}, 0
    while waiting or running:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            mutant = waiting.pop()
            started = Run(TESTS[mutant.file], mutant)
            running[started.pid] = started
        pid, status = os.wait()
        ended = running.pop(pid)
        killer, seconds = ended.end(status)
        survivors += not killer
        print(f"| {ended.mutant.name} | {killer or '**nothing**'} | {seconds:.1f} |", flush=True)
    print(f"{len(chosen)} mutants, {survivors} survived")
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
