"""Does a test notice when the agent learns from something wrong? `make test-mutants` breaks one place after the other:
of monobeast.py and r2d2.py, of their arithmetic, and of how rows reach them.

    python tests/mutants.py                      # all of them: 315 took 20 min on two shared cores
    python tests/mutants.py entropy slots.py     # those whose file or name contains one of these

Each mutant is a copy of the code with one piece of text replaced, and the fast tests of its file run on it until the
first one fails. Prints which test that was. The exit status is 1 if a mutant survives, and if a text does not occur
exactly once, which means that its file has changed: then change the mutant with it.
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
WIRE = [  # of test_env_server.py, where others wait for what goes wrong
    f"tests/test_env_server.py::test_{name}"
    for name in (
        "a_row_is_serialized_as_protobuf_would",
        "the_message_of_a_row_is_what_its_views_say_now",
        "of_stacks_that_have_shifted_a_deflated_row_has_the_newest_frames",
        "structures_keep_their_nesting",
        "the_arrays_of_a_nest_arrive_in_their_places",
        "arrays_arrive_as_they_were",
        "a_space_comes_back_from_its_json",
        "the_hello_tells_all_that_a_learner_needs",
        "rows_are_those_of_the_same_environments_here",
        "a_same_step_environment_sends_its_final_observations_beside_the_others",
        "a_seed_of_64_bits_is_taken",
        "a_nest_of_actions_is_for_servers_that_take_any_action",
        "every_dtype_and_transposed_memory_arrive",
    )
] + ["tests/test_dial.py::test_a_deflated_stream_begins_with_whole_stacks_whatever_the_last_one_had"]
RANKS = [  # of test_ranks.py, those of what all ranks have together
    f"tests/test_ranks.py::test_{name}"
    for name in (
        "the_mean_lag_is_the_ranks_own_over_what_counts_and_then_that_of_all",
        "a_rank_that_has_nothing_stores_nothing_and_knows_what_the_others_store",
        "two_ranks_learn_what_one_with_all_columns_learns",
        "two_ranks_of_r2d2_learn_what_one_with_all_sequences_learns",
        "the_other_programs_have_ranks_too",
        "ranks_of_r2d2_make_no_update_before_all_have_a_sequence",
    )
]
TESTS = {  # of each file, those that fail first
    "monobeast.py": ["tests/test_loss.py", "tests/test_update.py", "tests/test_net.py", *RANKS[2:3]],
    "r2d2.py": ["tests/test_r2d2.py", "tests/test_masks.py", *RANKS[3:]],
    "beast/learn/replay.py": [
        "tests/test_replay.py",
        "tests/test_r2d2.py::test_the_steps_of_a_run_bound_its_replay_unless_some_groups_or_a_later_start_may_bring_more",
    ],
    "beast/learn/qlearning.py": ["tests/test_r2d2.py"],
    "beast/learn/normalization.py": ["tests/test_net.py", "tests/test_update.py", "tests/test_tasks.py", *RANKS[2:3]],
    "beast/learn/learner.py": [
        *("tests/test_learner_arithmetic.py", "tests/test_update.py", "tests/test_learner.py"),
        *RANKS[:3],
    ],
    "beast/run/training.py": [
        "tests/test_ranks.py::test_ranks_begin_with_the_same_weights_and_noise_and_seeds_of_their_own_at_every_start",
        "tests/test_ranks.py::test_ranks_with_other_flags_or_environments_are_refused_by_what_differs",
    ],
    "beast/learn/graphs.py": ["tests/test_graphs.py"],
    "beast/learn/published.py": ["tests/test_graphs.py"],
    "multibeast.py": ["tests/test_multibeast.py", "tests/test_pool.py", "tests/test_tuned.py", "tests/test_kinds.py"],
    "beast/population/kinds.py": ["tests/test_kinds.py"],
    "beast/learn/learners.py": ["tests/test_multibeast.py"],
    "beast/population/routing.py": ["tests/test_pool.py", "tests/test_multibeast.py"],
    "beast/population/pool.py": ["tests/test_pool.py", "tests/test_kinds.py"],
    "beast/population/pbt.py": ["tests/test_pbt.py", "tests/test_kinds.py"],
    "beast/population/tuned.py": ["tests/test_tuned.py"],
    "beast/population/ratings.py": ["tests/test_ratings.py"],
    "beast/population/match.py": ["tests/test_match.py"],
    "beast/learn/vtrace.py": ["tests/test_vtrace.py"],
    "beast/learn/distributions.py": ["tests/test_distributions.py", "tests/test_masks.py"],
    "beast/envs/agents.py": ["tests/test_agents.py", "tests/test_kinds.py"],
    "beast/envs/groups.py": [
        "tests/test_agents.py",
        "tests/test_envs.py",
        "tests/test_oddities.py",
        "tests/test_masks.py",
        "tests/test_tuned.py::test_the_last_step_of_a_game_tells_terms_and_success_in_both_conventions",
    ],
    "beast/envs/probe.py": ["tests/test_oddities.py", "tests/test_masks.py"],
    "beast/envs/emulator.py": ["tests/test_atari_env.py"],
    "beast/envs/tensors.py": ["tests/test_device.py"],
    "beast/feeds/device.py": ["tests/test_device.py", "tests/test_kernels.py"],
    "beast/gpu/atari.py": ["tests/test_kernels.py"],
    "beast/gpu/kernels.py": ["tests/test_kernels.py"],
    "beast/gpu/tasks.py": ["tests/test_kernels.py"],
    "beast/envs/atari.py": ["tests/test_envs.py", "tests/test_kernels.py"],
    "beast/feeds/memory.py": ["tests/test_device.py"],
    "beast/envs/spaces.py": ["tests/test_net.py", "tests/test_oddities.py", "tests/test_kinds.py"],
    "beast/envs/numbers.py": ["tests/test_own_processes.py"],
    "beast/learn/ranks.py": ["tests/test_ranks.py"],
    "beast/envs/tasks.py": ["tests/test_tasks.py"],
    "beast/learn/records.py": ["tests/test_tasks.py"],
    "beast/envs/reference_scores.py": ["tests/test_tasks.py"],
    "beast/envs/resets.py": ["tests/test_resets.py"],
    "beast/envs/dmlab.py": ["tests/test_adapters.py"],
    "beast/envs/football.py": ["tests/test_adapters.py"],
    "beast/envs/doom.py": ["tests/test_doom.py"],
    "beast/envs/doom_game.py": ["tests/test_doom.py"],
    "beast/envs/doom_match.py": ["tests/test_doom.py"],
    "beast/feeds/processes.py": ["tests/test_own_processes.py"],
    "beast/envs/env_metrics.py": ["tests/test_env_metrics.py"],
    "beast/envs/progress.py": ["tests/test_env_metrics.py"],
    "beast/run/evaluation.py": ["tests/test_play.py", "tests/test_kinds.py"],
    "beast/run/checkpoint.py": ["tests/test_checkpoint.py", "tests/test_kinds.py"],
    "beast/feeds/slots.py": ["tests/test_shared_memory.py", "tests/test_rollout.py", "tests/test_feeds.py"],
    "beast/feeds/shared_memory.py": ["tests/test_shared_memory.py", "tests/test_feeds.py"],
    "beast/hosts/wire.py": WIRE,
    "beast/hosts/served_group.py": WIRE,
    "beast/hosts/throttle.py": ["tests/test_env_server.py::test_a_network_of_ipv6_guesses_as_one"],
    "beast/hosts/dialer.py": [
        "tests/test_dial.py::test_a_learner_that_refuses_is_left_out_while_another_trains",
        "tests/test_dial.py::test_a_certificate_of_no_use_is_told_in_a_line_and_again_later_while_others_are_served",
        "tests/test_dial.py::test_hello_and_rows_are_those_that_a_learner_gets_who_calls_the_server",
    ],
    "benchmarks/plan.py": [
        "tests/test_benchmarks.py::test_customers_of_a_station_wait_as_long_as_queueing_theory_says",
        "tests/test_benchmarks.py::test_a_plan_is_as_fast_as_its_slowest_part",
        "tests/test_benchmarks.py::test_the_policy_lag_of_a_plan_is_what_its_rollouts_and_its_queue_hold",
    ],
    "beast/machine.py": [
        "tests/test_own_processes.py::test_a_program_ends_with_all_that_the_environments_which_it_tried_have_left",
        "tests/test_own_processes.py::test_environments_have_time_to_close_and_the_wait_is_told",
        "tests/test_own_processes.py::test_a_process_that_has_inherited_a_mark_does_not_end_others_that_have_it",
    ],
    "beast/learn/demonstrations.py": ["tests/test_demonstrations.py"],
    "beast/feeds/actor.py": [
        "tests/test_own_processes.py::test_a_sign_of_life_of_a_thread_or_a_forked_process_cuts_no_message"
    ],
}
SLOW = (
    "learned or crash or killed or a_second or every_checkpoint or films or atari or its_replay_ratio or "
    "prepared or update_late or equal_to_the_bit or is_not_filled or called_after or of_the_page"
)


class Mutant(NamedTuple):
    name: str
    old: str
    new: str
    file: str = "monobeast.py"


MUTANTS = [
    Mutant("losses over this rank's transitions", "loss = loss / count\n", "loss = loss / weight.sum()\n"),
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
    Mutant("--discount ignored", "(*ends, flags.discount,", "(*ends, 0.99,"),
    Mutant(
        "truncation treated as termination",
        'ends = batch["done"], batch["terminated"],',
        'ends = batch["done"], batch["terminated"] | batch["truncated"],',
    ),
    Mutant(
        "termination bootstraps",
        'ends = batch["done"], batch["terminated"], batch["truncated"]',
        'ends = batch["done"], batch["done"] & False, batch["terminated"] | batch["truncated"]',
    ),
    Mutant("other policies' transitions trained on", 'flags.discount, batch.get("counts")', "flags.discount"),
    Mutant("other policies' observations observed", '(batch["obs"], batch.get("counts"))', '(batch["obs"])'),
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
        "x[first : t + 1]",
        "x[first : max(t, first + 1)]",
    ),
    Mutant(
        "final observation valued with the first core state", "_, _, core_state = net(map_tensors(", "net(map_tensors("
    ),
    Mutant("final observation taken for the first of an episode", ', "done": torch.zeros_like(last["done"])}', "}"),
    # the loss
    Mutant("void transitions trained", "weight = mask.float()", "weight = torch.ones_like(discounts)"),
    Mutant("count over all steps", "ranks.moments(weight,", "ranks.moments(torch.ones_like(weight),"),
    Mutant("ratio of void steps is infinite", "ratio = log_ratio.exp()", "ratio = log_rhos.exp()"),
    Mutant(
        "advantage statistics over void steps",
        "(advantages - means[0]) / variances[0].sqrt()",
        "(advantages - advantages.mean()) / advantages.var(correction=0).sqrt()",
    ),
    Mutant("advantages divided by their variance", "variances[0].sqrt().clamp", "variances[0].clamp"),
    Mutant("--normalize_advantages ignored", "if flags.normalize_advantages:", "if True:"),
    Mutant("advantage not detached", " - values[:-1].detach()) / unit", " - values[:-1]) / unit"),
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
    Mutant(
        "last reward not scaled",
        'last_reward = scale_rewards(self.flags, inputs["reward"])',
        'last_reward = inputs["reward"]',
    ),
    Mutant(
        "one rate for all groups",
        "learning_rate(flags, learner.schedule_steps, initial)",
        "learning_rate(flags, learner.schedule_steps)",
    ),
    Mutant("last reward not zeroed where an episode begins", "unsqueeze(-1).masked_fill(begins, 0)", "unsqueeze(-1)"),
    Mutant(
        "last action not zeroed where an episode begins",
        'inputs["action"]).masked_fill(begins, 0)',
        'inputs["action"])',
    ),
    Mutant(
        "--normalize_observations ignored",
        "if self.is_image else flags.normalize_observations",
        "if self.is_image else True",
    ),
    Mutant(
        "statistics observed before the loss",
        "    popart = value_head(net)\n    outcome",
        '    net.observe(batch["obs"])\n    popart = value_head(net)\n    outcome',
    ),
    Mutant("statistics observed in every epoch", "        if epoch == 0:\n", "        if True:\n"),
    Mutant("returns not observed", "            if popart:\n", "            if False:\n"),
    # the update and its loops
    Mutant("gradient not clipped", "flags.grad_clip or math.inf)", "math.inf)"),
    Mutant("--grad_clip 0 stops learning", "flags.grad_clip or math.inf)", "flags.grad_clip)"),
    Mutant("bad update not skipped", "step_unless(optimizer, outcome.is_bad)", "optimizer.step()"),
    Mutant("loss not looked at", "~(loss.isfinite() & grad_norm.isfinite())", "~grad_norm.isfinite()"),
    Mutant("gradient not looked at", "~(loss.isfinite() & grad_norm.isfinite())", "~loss.isfinite()"),
    Mutant("--epochs ignored", "in range(flags.epochs):", "in range(1):"),
    Mutant("--minibatches ignored", "core_state, flags.minibatches)", "core_state, 1)"),
    Mutant(
        "minibatches with the core states of the batch",
        "partial(gradients, flags, learner), part, state)",
        "partial(gradients, flags, learner), part, core_state)",
    ),
    Mutant("--value_net ignored", "encode(self.value_encoders, self.value_join) if is_separate else x", "x"),
    Mutant("--initial_std ignored", "math.log(flags.initial_std)", "0.0"),
    Mutant(
        "learning rate not decayed",
        'group["lr"] = learning_rate(flags, learner.schedule_steps, initial)',
        'group["lr"] = flags.learning_rate',
    ),
    Mutant("learning rate below 0", "max(1 - steps / flags.total_steps, 0.0)", "1 - steps / flags.total_steps"),
    Mutant("--lr_decay none decays", 'if flags.lr_decay == "linear" else 1.0', ""),
    Mutant("gradients of all updates added up", "learner.optimizer.zero_grad(set_to_none=True)", "pass"),
    Mutant(
        "core state of the wrong row",
        "rows.answer(action, policy_logits, baseline, version, core_state)",
        "rows.answer(action, policy_logits, baseline, version, rows.core_state)",
    ),
    Mutant("most probable action always", ".sample(generator)", ".mode()"),
    Mutant(
        "weights published under an old version",
        "weights.publish(learner.net, learner.updates)",
        "weights.publish(learner.net, learner.updates - 1)",
    ),
    Mutant("run never finished", "in training.rollouts(feed)", "in feed.rollouts()"),
]
# The other files. Name, old and new text.
OTHER_MUTANTS = {
    "beast/learn/normalization.py": [
        (
            "observations of this rank",
            "totals(weight.sum(), (x * weight).sum(0))",
            "(weight.sum(), (x * weight).sum(0))",
        ),
        (
            "variance of this rank's observations",
            "total(((x - mean).square() * weight).sum(0))",
            "((x - mean).square() * weight).sum(0)",
        ),
        ("returns of this rank", "totals(mask.sum((-2, -1)), returns", "(mask.sum((-2, -1)), returns"),
        (
            "variance of this rank's returns",
            "total((returns - mean.view(-1, 1, 1)).square().where(mask, 0).sum((-2, -1)))",
            "(returns - mean.view(-1, 1, 1)).square().where(mask, 0).sum((-2, -1))",
        ),
        ("the unit of no task", "self.deviation[task_of(batch, self.out_features)[:-1]]", "self.deviation.mean()"),
        (
            "moments of all tasks",
            "mask = mask & (task_of(batch, self.out_features)[:-1] == tasks)",
            "mask = mask & (tasks >= 0)",
        ),
        ("moments of what does not count", "returns.where(mask, 0)", "returns"),
        (
            "values of another task",
            "task_of(inputs, values.shape[-1]).unsqueeze(-1)",
            "0 * task_of(inputs, values.shape[-1]).unsqueeze(-1)",
        ),
        ("tasks that there are not", ".long().clamp(0, num_tasks - 1)", ".long()"),
        (
            "weights of the first task follow",
            "self.weight *= (old_deviation / self.deviation).view(-1, 1)",
            "self.weight *= (old_deviation / self.deviation).flatten()[0]",
        ),
        (
            "statistics updated in forward",
            "        x = self.numbers(x)\n        if",
            "        self.observe(x)\n        x = self.numbers(x)\n        if",
        ),
        (
            "statistics updated in forward where it acts",
            "        x = self.numbers(x)\n        if",
            "        torch.is_grad_enabled() or self.observe(x)\n        x = self.numbers(x)\n        if",
        ),
        ("images of integers and floats in raw numbers", "unit = 1 / largest if", "unit = 1.0 if"),
        ("integers not normalized", "space.dtype != np.uint8 or space.high.max() < 255", "space.dtype.kind == 'f'"),
        ("older images of floats rescaled", 'weights.setdefault(f"{prefix}center.unit", torch.ones(()))', "pass"),
        ("image statistics of the first row", "self.numbers(x[-1:])[0]", "self.numbers(x[:1])[0]"),
        ("vector statistics of the last row only", "self.numbers(x).flatten(0, 1)", "self.numbers(x[-1:])[0]"),
        ("vectors not clipped", "output.clamp(-10, 10).where(x.isfinite(), output)", "output"),
        ("infinite vectors clipped", ".clamp(-10, 10).where(x.isfinite(), output)", ".clamp(-10, 10)"),
        ("NaN in the statistics", ".where(is_usable, self.mean)", ""),
        ("squares that overflow in the statistics", "x.abs() < 1e15", "x.isfinite()"),
        ("rounding of large vectors scaled up", "+ self.floor + rounding)", "+ self.floor)"),
        ("weights of before the statistics get some", "encoder.center.register_buffer(name, None)", "pass"),
        (
            "images of another shape lose their statistics",
            'center.count" not in weights',
            'center.mean" not in weights',
        ),
        (
            "statistics count what was seen elsewhere",
            'state_dict.pop(f"{prefix}count", None)',
            'state_dict.get(f"{prefix}count")',
        ),
        ("image statistics forget", "share = number / (self.count + number).clamp(min=1)", "share = 1.0"),
        ("all observations observed", "number: int | Tensor = len(x)\n", "number, counts = len(x), None\n"),
        ("images that count chosen by the first row", "counts[-1] if self.is_image", "counts[0] if self.is_image"),
        ("nothing observed divided by", "(self.count + number).clamp(min=1)", "(self.count + number)"),
        ("a mean of nothing", "mean = sums / number.clamp(min=1)\n", "mean = sums / number\n"),
        (
            "values follow the returns' deviation",
            "self.weight *= (old_deviation / self.deviation)",
            "self.weight *= torch.ones_like(old_deviation)",
        ),
        ("returns of no transition observed", "is_bad = is_bad | ~returns.mean.isfinite()", "pass"),
        ("values follow the returns' mean", "old_deviation + old_mean - self.mean)", "old_deviation)"),
        ("returns of a bad update observed", "torch.where(is_bad, 0, self.RATE)", "torch.tensor(self.RATE)"),
        (
            "mean of the returns not in their deviation",
            "square() + difference.square() * (1 - rate)",
            "square()",
        ),
    ],
    "beast/learn/learner.py": [
        ("a bad epoch told by the numbers after it", "torch.where(self.is_bad, self.metrics[name], x)", "x"),
        ("bad epoch forgotten", "Outcome(self.is_bad | later.is_bad,", "Outcome(later.is_bad,"),
        (
            "a bad epoch told by the gradient after it",
            "torch.where(self.is_bad, self.grad_norm, later.grad_norm)",
            "later.grad_norm",
        ),
        ("void transitions counted as steps", "own = steps.sum()", "own = torch.ones_like(steps).sum()"),
        ("other policies' transitions counted as steps", ", steps & counts\n", ", steps\n"),
        ("void transitions counted beside other policies", ", steps & counts\n", ", counts\n"),
        ("other policies' lag", "lag.where(counts, 0), ", "lag, "),
        ("lag over all rows", "lag.sum() / counts.sum().clamp(min=1)", "lag.mean()"),
        ("rows that count one row late", 'batch["counts"][1:]', 'batch["counts"][:-1]'),
        ("steps counted one row late", 'batch["truncated"])[:-1]', 'batch["truncated"])[1:]'),
        ("steps and lag of this rank", "of_tasks = ranks.totals(*own)", "of_tasks = own"),
        ("lags of the ranks added up", "lags / ranks.size()", "lags"),
        ("lag of this rank alone", "ranks.of_each(lag.max())", "lag.max()"),
        ("steps of this rank's replay", "ranks.totals(steps.sum(), some,", "(steps.sum(), some,"),
        ("policy lag of row t", 'batch["policy_version"][1:]', 'batch["policy_version"][:-1]'),
        ("lag counted from the update that begins", "self.updates - batch", "self.updates + 1 - batch"),
        (
            "bad updates in a row never end",
            "self.bad_updates_in_a_row + 1 if is_bad else 0",
            "self.bad_updates_in_a_row + is_bad",
        ),
        ("rates of a checkpoint kept", '            group["lr"] = rate\n', "            pass\n"),
        ("random numbers not resumed", 'torch.set_rng_state(state["rng"])', "pass"),
        ("returns not resumed", 'self.returns.extend(state["returns"])', "pass"),
        ("moments of the memory format before", "torch.empty_like(parameter).copy_(moment)", "moment"),
        ("bad update not skipped", "    elif not is_bad:", "    else:"),
        ("the last spoiled environment told", "spoiled.nonzero()[0]", "spoiled.nonzero()[-1]"),
        ("the next batch blamed", "[batch, next_batch or {}]", "[next_batch or {}, batch]"),
    ],
    "beast/learn/ranks.py": [
        ("a failure ends others well", "2.0 if has_failed else 1.0 if", "1.0 if"),
        ("flags of ranks not compared", "    if names:\n", "    if False:\n"),
        ("void batches of floats that are not finite", "torch.zeros_like(x) if x.is_f", "x.clone() if x.is_f"),
        ("metrics added up", "(means / size()).unbind()", "means.unbind()"),
        ("means of a rank", "count, *sums = totals(", "count, *sums = ("),
        ("deviations of a rank", "squares = totals(*(", "squares = list(("),
        ("steps of this rank", "int(rounds[0].steps)", "int(learner.steps)"),
        ("gradients of this rank", "_collective(dist.all_reduce, bucket)", "pass"),
        ("games of this rank", "self._learner.take_games(each.games)", "pass"),
        ("weights not compared", "if max(sums) - min(sums) > DRIFT * max(sums):", "if False:"),
        ("weights compared to the bit", "> DRIFT * max(sums)", "> 0"),
        ("weights of the first ranks compared", "max(sums) - min(sums)", "sums[1] - sums[0]"),
        (
            "weights compared at the start alone",
            "if learner.updates % UPDATES_BETWEEN_CHECKS else",
            "if learner.updates else",
        ),
        ("sums of weights in which signs cancel", "x.detach().double().abs().sum()", "x.detach().double().sum()"),
    ],
    "beast/run/training.py": [
        ("weights of each rank", '            learner.net.load_state_dict(state["net"])', "            pass"),
        ("noise and seeds of rank 0", "group += ranks.number() << 20", "pass"),
        ("other environments taken", "ranks.require_equal(spaces.comparable())", "pass"),
    ],
    "beast/learn/graphs.py": [
        ("gradients left where the recording before put them", "parameter.grad = gradient", "pass"),
        ("results shared by all calls", "map_tensors(torch.clone, recording.results)", "recording.results"),
        ("the first arguments again", "torch._foreach_copy_(recording.arguments, tensors)", "pass"),
        ("one recording for all shapes", "(x.shape, x.dtype) for x in tensors", "x.dtype for x in tensors"),
        ("garbage collected while it records", "gc.disable()", "pass"),
        ("no garbage collected any more", "gc.enable()", "pass"),
        ("recorded on a stream that is a thread's", "torch.cuda.Stream(priority=-1)", "torch.cuda.Stream()"),
    ],
    "beast/learn/published.py": [
        ("two threads compile at once", "nullcontext() if shapes in seen else _compiling", "nullcontext()"),
        ("a call amid a foreign trace raises", "error_on_nested_fx_trace=False", "error_on_nested_fx_trace=True"),
    ],
    "beast/envs/tasks.py": [
        (
            "neighbours of one task",
            "slice(t, None, len(made)) for t",
            "slice(t * num_envs // len(made), (t + 1) * num_envs // len(made)) for t",
        ),
        ("numbers of tasks that are made", "self.names.index(name)", "[*made].index(name)"),
        ("seeds of the first task for all", "seed + env.num_envs", "seed"),
        ("what fills up is left as it was", "whole[columns, ..., part.shape[-1] :] = 0", "pass"),
        ("infos of nobody", 'f"_{key}" not in infos:', "False:"),
        ("other modes taken", "if len({*modes.values()}) > 1:", "if False:"),
        ("filled up final observations", "if is_padded and", "if False and"),
        ("agents taken", "if each.agents > 1:", "if each.agents > 99:"),
        ("unequal actions taken", "if space != found[0]:", "if False:"),
        ("bounds of the longest alone", "np.minimum(low[inside], shorter.low)", "low[inside]"),
        ("bounds without zeros", "np.minimum(low[beyond], 0)", "low[beyond]"),
        ("two of a name", 'f"{name}#{seen[name]}"', "name"),
        ("all actors play the first task", "names[actor % len(names)]", "names[0]"),
        ("unequal compute", "if is_by_actor and flags.num_actors % num_tasks:", "if False:"),
        ("unknown task", "if is_env_known and flags.task and flags.task not in names:", "if False:"),
        ("one reference", "and len(numbers) != 1", ""),
        ("equal references", "and len({*numbers}) == len(numbers)", ""),
        ("other keys", "told.keys() <= OF_A_TASK and", ""),
        ("sets in files", 'if each["env"] in SETS:', "if False:"),
        ("tasks before the evaluation's arguments", "{**task.env_kwargs, **kwargs}", "{**kwargs, **task.env_kwargs}"),
        ("the file is asked for again", "flags = changed(flags, tasks=json.dumps(told))", "pass"),
    ],
    "beast/learn/records.py": [
        ("void steps count", "steps.flatten().float()", "torch.ones_like(task.flatten()).float()"),
        ("games of all tasks", "rows[name][:, of_column == number]", "rows[name]"),
        ("numbers of no task", ".clip(0, len(self.names) - 1)", ""),
        ("a score of few games", "if any(len(games) < least for games in self._games):", "if False:"),
        ("scores of some tasks", "if not all(self._references) or", "if"),
        ("no games in checkpoints", 'self._games[number].extend(own["games"])', "pass"),
        ("no steps in checkpoints", 'own["steps"], own["episodes"]', 'self.steps[number], own["episodes"]'),
    ],
    "beast/envs/reference_scores.py": [
        ("not from random play", "(mean_return - self.random)", "mean_return"),
        ("training levels without a reference", '.replace("_train", "_test")', ""),
        ("test levels in training", "if training else name", "if False else name"),
    ],
    "beast/envs/resets.py": [
        ("nothing begins ahead", "self._begun = _thread().submit(self._begin)", "self._begun = None"),
        ("waits behind others", "self._begin() if begun.cancel() else begun.result()", "begun.result()"),
        ("what a seed gave is not played", "self._env, self._other = self._other, self._env", "pass"),
        ("equal seeds for both", "np.random.SeedSequence([seed, 1])", "np.random.SeedSequence([1])"),
        ("the other is not closed", "            self._other.close()", "            pass"),
        ("a begun episode goes on", "or seed is not None or options", ""),
    ],
    "beast/envs/dmlab.py": [
        ("one frame a step", "num_steps=self._frame_skip", "num_steps=1"),
        ("an end truncates", "float(reward), is_over, False", "float(reward), False, is_over"),
        ("equal levels", "seed=int(self.np_random.integers(2**31))", "seed=0"),
        ("options are no texts", "{key: str(value) for", "{key: value for"),
        ("levels by their own name", 'f"contributed/dmlab30/{level}" if is_of_dmlab30 else level', "level"),
        ("words in any order", "numbers[index] = 1 +", "numbers[0] = 1 +"),
        ("a word that is none", "1 + zlib.crc32(word.encode()) % (VOCABULARY - 1)", "0"),
        ("not held out", "(HELD_OUT if held_out else {})", "{}"),
        ("written in place", "shutil.copyfile(pk3_path, temporary)", "shutil.copyfile(pk3_path, path)"),
        ("a look at every write", "if self._written > self._limit / 1000:", "if True:"),
        ("an endless cache", "self._forget(keep=path)", "pass"),
        ("the oldest, used or not", "os.utime(path)  # it was used now", "pass"),
        ("the newest goes, too", "if path != str(keep):", "if True:"),
        ("half a file stays", "                    os.unlink(temporary)", "                    pass"),
    ],
    "beast/envs/football.py": [
        ("the clock terminates", 'bool(done) and self.env.unwrapped.observation()[0]["steps_left"] <= 0', "False"),
        ("a clock below 0 terminates", '["steps_left"] <= 0', '["steps_left"] == 0'),
        ("equal games", "int(self.np_random.integers(ENGINE_SEEDS))", "1"),
        ("equal matches", "int(self._random.integers(ENGINE_SEEDS))", "1"),
        ("always from left to right", "bool(seed % 2)", "False"),
        ("the last reward is the success", "self._goals += float", "self._goals = float"),
        ("success of the left for the right", '-info["true_objective"]', 'info["true_objective"]'),
        ("any number of players", "0 <= left <= MOST_PLAYERS and", ""),
        ("no players", "and left + right)", ")"),
        ("agents go on after the end", "self.agents = [] if done else agents", "self.agents = agents"),
    ],
    "multibeast.py": [
        ("nets see the parts of all kinds", "net(kind.own(inputs), core_state)", "net(inputs, core_state)"),
        ("equal steps for all kinds", "seats_by_kind.count(number) / len(seats_by_kind)", "1 / len(kinds)"),
        ("seats of any kind", "random.choice(population.live(kind))", "random.choice(population.live())"),
        ("past ones of any kind", "population.past(game.kinds[seat])", "population.past()"),
        ("all act as policy 0", "weights[policy].newest() if", "weights[0].newest() if"),
        ("all are trained with the run's flags", "update(tuned.flags[policy], learner", "update(flags, learner"),
        ("a policy publishes to another one", "weights[policy].publish(learner.net", "weights[0].publish(learner.net"),
        ("old batches trained on", "if 0 < flags.max_policy_lag < measured.lag_max:", "if False:"),
        ("nothing copied", "{**copy.deepcopy(donor.state_dict()), **own,", "{**learner.state_dict(), **own,"),
        ("moments shared with the donor", "copy.deepcopy(donor.state_dict()), **own", "donor.state_dict(), **own"),
        ("counts copied", ' if name in ("counts", "rng")}', ' if name == "rng"}'),
        ("games twice", '**own, "returns": [],', '**own, "returns": learner.returns,'),
        (
            "new numbers at the next start",
            "                population.inherit(donor, policy)\n            tuned.apply()",
            "                population.inherit(donor, policy)",
        ),
        ("policies of some tasks", "num_columns % (flags.num_policies * num_tasks)", "False"),
        ("policies of one task", 'flags.balance == "compute" or', ""),
        ("the best of rivals", "len(kinds) == 1 and not flags.past_every", "len(kinds) == 1"),
        ("a copy is no update", "    learner.updates += 1\n", "    pass\n"),
        ("what older weights chose is trained on", "dealer.forget(policy, learners.each[policy].updates)", "pass"),
        ("games of former weights count", "games.forget(policy, learners.each[policy].updates)", "pass"),
        ("past policies in no game", "if random.random() < flags.past_share", "if False"),
        (
            "neighbours have other policies",
            "game.env * flags.num_policies // game.num_envs",
            "game.env % flags.num_policies",
        ),
        ("forks that ignore counts train", "if not all(is_one(loss_of(1.0, other)) for other in range(1, 6)) or", "if"),
        (
            "one seed for all nets",
            "[agent.make_learner(own",
            "[torch.manual_seed(0) and agent.make_learner(own",
        ),
    ],
    "beast/population/kinds.py": [
        (
            "numbers of other kinds",
            'rows["action"][..., : math.prod(self._shape)]',
            'rows["action"][..., -math.prod(self._shape) :]',
        ),
        ("actions as rows store them", ".to(self._dtype),", ","),
        (
            "parameters of other kinds",
            "return policy_logits[..., : self._width]",
            "return policy_logits[..., -self._width :]",
        ),
        ("actions placed last", "(0, self._row_size - flat.shape[-1])", "(self._row_size - flat.shape[-1], 0)"),
        ("parameters placed last", "(0, self._row_width - self._width)", "(self._row_width - self._width, 0)"),
        ("any core state", "if found != shapes[0]:", "if False:"),
        (
            "a team of one",
            "columns = self._columns(kind, num_columns)",
            "columns = self._columns(self.kinds[0], num_columns)",
        ),
    ],
    "beast/learn/learners.py": [
        (
            "games of all told to each",
            'learner.record_games({**rows, "counts": rows["policy"] == policy})',
            "learner.record_games(rows)",
        ),
        ("games of past policies told", '{**rows, "counts": rows["policy"] < len(self.each)}', "rows"),
        (
            "counts of the first one",
            "sum(getattr(learner, name) for learner in self.each)",
            "getattr(self.each[0], name)",
        ),
        ("draws begin anew", 'self.random.bit_generator.state = state["draws"]', "pass"),
        ("the rest of a checkpoint forgotten", "part.load_state_dict(state[name])", "pass"),
    ],
    "beast/population/routing.py": [
        (
            "drawn at each row",
            "begins(done, step, self.count)):\n            game",
            "begins(done | True, 0 * step, self.count)):\n            game",
        ),
        (
            "drawn at each life",
            "begins(done, step, self.count)):\n            game",
            "begins(done, 0 * step, self.count)):\n            game",
        ),
        (
            "who comes later is drawn anew",
            "(episode_step == 0).reshape(-1, seats).all(1)",
            "(episode_step == 0).reshape(-1, seats).any(1)",
        ),
        (
            "environments numbered within their group",
            "group.astype(np.int64) * self._group_width + number",
            "number",
        ),
        ("choices unchecked", "if tuple(map(self._kind_of, chosen)) != game.kinds:", "if len(chosen) != game.seats:"),
        (
            "columns of all policies dealt to each",
            "columns = as_slice(own[1:].any(0)",
            "columns = as_slice((own | True)[1:].any(0)",
        ),
        ("edits of one policy are another's", "if isinstance(columns, slice) and not own", "if False and not own"),
        ("what waits is lost", "map_tensors(torch.clone, rest) if first < num_columns else None", "None"),
        ("what waits lies in the slot", "map_tensors(torch.clone, rest) if first", "rest if first"),
        ("counts always left out", 'if batch["counts"][1:].all():', "if True:"),
        ("counts of row t", 'if batch["counts"][1:].all():', 'if batch["counts"][:-1].all():'),
        (
            "the state of other columns",
            'take(({**rollout, "counts": own}, core_state), columns)',
            '(take({**rollout, "counts": own}, columns), take(core_state, slice(0, 1)))',
        ),
        ("games of no steps told", 'if rows["episode_step"][t, k] + is_same_step > 0:', "if True:"),
        ("games told at their first row", "last = t + int(is_same_step)", "last = t + 1"),
        ("success of the game before", "last = t + int(is_same_step)", "last = t"),
        ("the last reward of a game lost", " + is_same_step * rows", " + 0 * rows"),
        ("success not told", "x.objective if is_told else x.episode_return", "x.episode_return"),
        ("crashed games count", "(is_told or task not in self._have_objectives)", "True"),
        (
            "seats scored by different measures",
            "not any(np.isnan(part.objective) for",
            "not all(np.isnan(part.objective) for",
        ),
        ("games of former weights count", "versions[x.column] < self._since[x.policy]", "False"),
        ("games by the weights of their end", "np.repeat(begun, self._seats), rows", "True, rows"),
        ("versions of another group", "self._first_versions.get(group,", "self._first_versions.get(0,"),
        ("a gap is no gap", "if stop - first == len(index) else", "if True else"),
    ],
    "beast/population/pool.py": [
        ("past policies follow their parents", "Past(own_copy(self._nets[policy])", "Past((self._nets[policy])"),
        ("the oldest half stays", "dropped = own[-2::-2]", "dropped = own[len(own) // 2 :]"),
        ("past policies as often as before", "        self._every[kind] *= 2\n", ""),
        ("nets for ever", "            del self._all[number]\n", "            pass\n"),
        ("a game goes on without its net", "self._dropped - playing -", "self._dropped -"),
        ("freed as soon as dropped", "self._dropped = {*self._all} - {*self._kept}", "self._dropped = set()"),
        ("numbers used twice", "number, self._next_number + 1\n", "number, self._next_number\n"),
        (
            "one draw of past policies",
            "            self._drawn_at[kind] = steps\n            self._draw(kind)",
            "            self._drawn_at[kind] = steps",
        ),
        ("a loss is a win", "np.sign(one.score - other.score)", "np.sign(other.score - one.score)"),
        ("a policy beats itself", "(other for other in game if other.policy != one.policy)", "game"),
        ("past policies begin without results", "            self.inherit(policy, number)\n", ""),
        ("draws of past policies begin anew", 'self._random.bit_generator.state = state["draws"]', "pass"),
        (
            "past policies of any kind",
            "for number in self._kept if self.kind_of(number) == kind",
            "for number in self._kept",
        ),
        (
            "past ones of all kinds drawn",
            "for number in self._drawn if self.kind_of(number) == kind",
            "for number in self._drawn",
        ),
        ("live ones of the first kind", "range(kind * self._each, (kind + 1) * self._each)", "range(self._each)"),
        ("past policies with the weights of now", 'net.load_state_dict(saved["net"])', "pass"),
    ],
    "beast/population/pbt.py": [
        (
            "the best are replaced",
            "worst = ranked[:count], ranked[max(count, len(ranked) - count) :]",
            "worst = ranked[:count], ranked",
        ),
        ("the first is always first", "key=lambda policy: (-objectives[policy], policy)", "key=lambda policy: policy"),
        ("the worst are ranked best", "(-objectives[policy], policy)", "(objectives[policy], policy)"),
        ("young ones ranked", "if games[policy] >= self.rules.min_games]", "if games[policy] > 0]"),
        ("replaced whatever the gap", "if self._is_better(objectives[candidate], objectives[policy]):", "if True:"),
        ("a gap relative to the better one", "max(abs(candidate), abs(own))", "abs(candidate)"),
        ("no absolute gap", "gap > self.rules.gap_absolute and", ""),
        (
            "own numbers kept with copied weights",
            "values = dict(self.values[donor])",
            "values = dict(self.values[policy])",
        ),
        ("the first one mutates", "self.rules.keep_first and policy % self._each == 0", "False"),
        ("all kinds ranked together", "self._each = num_policies // num_kinds", "self._each = num_policies"),
        ("numbers only grow", "factor if grows else 1 / factor", "factor"),
        (
            "discounts multiplied",
            "if name in BELOW_ONE else values[name] * factor",
            "if False else values[name] * factor",
        ),
        (
            "mutations that the agent does not take",
            "if changes and self._is_valid({**values, name: new}):",
            "if changes:",
        ),
        (
            "games of former weights count",
            "                self.windows[change.policy].clear()\n",
            "                pass\n",
        ),
        ("events at each step", "self.rules.start + self.num_events * self.rules.period", "self.rules.start"),
        ("draws of mutations begin anew", 'self._random.bit_generator.state = state["draws"]', "pass"),
        ("ties broken at random", "not all(map(math.isfinite, objectives))", "False"),
    ],
    "beast/population/tuned.py": [
        ("rates grow on and on", "for rate in self._rates[policy]]", "for rate in learner.rates]"),
        ("betas stay", 'group["betas"] = (values[BETA1], group["betas"][1])', "pass"),
        (
            "terms of the next policy",
            'row["policy"].long().clamp(max=len(self.flags))',
            '(row["policy"].long() + 1).clamp(max=len(self.flags))',
        ),
        ("rewards of terms alone", 'row["reward"] += (', 'row["reward"][...] = ('),
        ("coefficients added to the defaults", 'term}", default) - default', 'term}", default)'),
        ("who is alone wins or loses", "if len(game) == 1 and", "if False and"),
        ("a tie is a win", "float(seat.score > best)", "float(seat.score >= best)"),
        ("past policies recorded", "(seat for seat in game if seat.policy < len(self.flags))", "game"),
    ],
    "beast/population/ratings.py": [
        ("no interval at 0 and 1", "p * (1 - p) / total + z2 / (4 * total**2)", "p * (1 - p) / total"),
        ("a tie is a loss", "mean = (wins + ties / 2) / games", "mean = wins / games"),
        ("ties have no deviation", "(wins + ties / 4) / games - mean**2", "mean - mean**2"),
        ("one side of the sign test", "min(2 * float(", "min(1 * float("),
        ("no game with a player of rating 0", "+ 0.5 - _logistic(x)", ""),
    ],
    "beast/population/match.py": [
        (
            "the first rival has the first seat",
            "leads = np.array([(env + len(games)) % 2 for",
            "leads = np.array([0 * (env + len(games)) for",
        ),
        (
            "one rival plays all seats",
            "(leads[:, None] + np.arange(seats)) % 2",
            "(leads[:, None] + 0 * np.arange(seats)) % 2",
        ),
        ("games go on", "is_cut = lengths[env] >= max_steps", "is_cut = lengths[env] >= 10 * max_steps"),
        ("returns decide", "if any(game.objectives for game in played):", "if False:"),
        (
            "a cut game has an objective",
            'float(before["episode_return"][k]), np.nan)',
            'float(before["episode_return"][k]), 0.0)',
        ),
        ("a game is a step short", "lengths[env] + is_same_step[env]", "lengths[env]"),
        ("lengths of the game before", "lengths[env], is_over[env] = 0, False", "is_over[env] = False"),
        ("spaces unchecked", "if layout(rival.spaces) != layout(group.spaces):", "if False:"),
        (
            "a cut game counts twice",
            "if (has_ended[env] or is_cut) and not is_over[env]:",
            "if has_ended[env] or is_cut:",
        ),
    ],
    "beast/learn/vtrace.py": [
        ("other policies' transitions count", "mask & counts[1:]", "mask"),
        ("the transition from a row counts", "mask & counts[1:]", "mask & counts[:-1]"),
        ("void transitions count beside other policies", "else mask & counts[1:]", "else counts[1:]"),
        ("discount of row t", "(~(terminated | done)[1:])", "(~(terminated | done)[:-1])"),
        ("void transition one row late", "truncated)[:-1]\n", "truncated)[1:]\n"),
        ("bootstraps across a same-step reset", "(terminated | done)", "terminated"),
        ("recursion leaves out the last step", "range(len(rows) - 2, -1, -1)", "range(len(rows) - 3, -1, -1)"),
        ("trace cut by the step after", "addcmul_(decays[t], rows[t + 1])", "addcmul_(decays[t + 1], rows[t + 1])"),
        ("trace weights not clipped at 1", "rhos.clamp(max=1.0) * lambda_", "clipped_rhos * lambda_"),
        ("lambda twice", "clipped_rhos * (rewards", "lambda_ * clipped_rhos * (rewards"),
        ("next values of row t", "next_values = torch.cat([values[1:], bootstrap_value])", "next_values = values"),
        ("advantages from values", "torch.cat([vs[1:], bootstrap_value])", "next_values"),
        ("--clip_pg_rho is --clip_rho", "VTraceReturns(vs, pg_rhos *", "VTraceReturns(vs, clipped_rhos *"),
    ],
    "beast/learn/distributions.py": [
        ("probability of the first part", "torch.cat(chosen, dim=-1).sum(-1)", "chosen[0].squeeze(-1)"),
        (
            "choices in reverse",
            "zip(self._log_probs, choices.split(1, dim=-1))",
            "zip(self._log_probs, choices.flip(-1).split(1, dim=-1))",
        ),
        ("clocks of the wrong sign", "self.logits - log_clocks", "self.logits + log_clocks"),
        ("entropy of the first part", "for part in self._log_probs)", "for part in self._log_probs[:1])"),
        ("mode for a sample", "return self._best(self.logits - log_clocks)", "return self._best(self.logits)"),
        ("means for deviations", "self.mean, log_std = parameters", "log_std, self.mean = parameters"),
        ("density without its deviation", "- self.log_std - HALF_LOG_2_PI", "- HALF_LOG_2_PI"),
        ("density of the variance", "torch.exp(-self.log_std)", "torch.exp(-2 * self.log_std)"),
        ("entropy without its half", "(0.5 + HALF_LOG_2_PI)", "HALF_LOG_2_PI"),
        ("noise of the variance", "* self.log_std.exp() + self.mean", "* (2 * self.log_std).exp() + self.mean"),
        (
            "deviations pushed out",
            "(log_std > LOG_STD_MAX) & (gradient < 0)",
            "(log_std > LOG_STD_MAX) & (gradient > 0)",
        ),
        ("features of the parts in reverse", "zip(zeros, choices)]", "zip(zeros, choices[::-1])]"),
        ("features of a Box not clamped", "action.float().clamp(-1.0, 1.0)", "action.float()"),
        ("a part without a choice not uniform", "part * otherwise", "part"),
        (
            "the first part's mask",
            "mask.bool().split(layout",
            "mask.bool().roll(1, -1).split(layout",
        ),
    ],
    "beast/run/evaluation.py": [
        ("games of all kinds", "action.columns(kind, width).tolist() if", "list(range(width)) if"),
        ("flags that are given ignored", "with_tasks(replace(trained, **changed))", "with_tasks(trained)"),
        ("defaults that are given ignored", "if name in given or getattr", "if getattr"),
        ("spaces not compared", "if layout(spaces) != layout(learned):", "if False:"),
        ("a game that ends at the limit cut", ' & ~(after["terminated"] | after["truncated"])', ""),
        (
            "numbers of games after a cut",
            "told[index] += [] if is_cut[index] else [numbers]",
            "told[index] += [numbers]",
        ),
    ],
    "beast/run/checkpoint.py": [
        ("a team without the policy", "policy if number == policy // each else number * each", "number * each"),
        ("the spaces of another kind", "list(kinds)[policy // each]", "list(kinds)[0]"),
        (
            "a subclass's space taken for its base",
            "if whole is None or not {type",
            "if whole is None or False and not {type",
        ),
        ("masks in infos forgotten", '"has_mask": MASK in env_spaces.observations', '"has_mask": False'),
    ],
    "beast/envs/env_metrics.py": [
        ("numbers of the game that begins", "if final is None or not infos", "if True or not infos"),
        ("numbers of the first environment", "    return values[k]\n", "    return values[0]\n"),
        ("masks of infos ignored", "if values is None or not infos", "if values is None or False and not infos"),
        ("numbers that are not finite", "number if math.isfinite(number) else", "number if True else"),
        ("mean over all rows", "sums, self._sums = self._sums, {}", "sums = self._sums"),
        ("names without end", "and len(self._known) >= MAX_NAMES:", "and False:"),
    ],
    "beast/envs/progress.py": [
        ("one page for all threads", 'if not hasattr(_of_thread, "page"):', "if not _newest:"),
        ("a page that is half written", "]) == crc:", "]) or True:"),
    ],
    "beast/envs/agents.py": [
        ("rewards of before", "self._rewards[:] = 0", "pass"),
        ("nobody is absent", "self._absent[:] = True", "pass"),
        ("one action for all", "actions[begin + self.names.index(agent)]", "actions[begin]"),
        ("equal seeds", "seed + index * len(self.names)", "seed"),
        ("unequal spaces taken", "if isinstance(action, ActionsByKind):\n        first", "if False:\n        first"),
        (
            "all agents of the first kind",
            "kinds = tuple(names[found.index(each)] for each in found)",
            "kinds = tuple(names)",
        ),
        ("blanks of zeros", '+ getattr(space, "start", 0)', ""),
        ("masks of any form", "observation = {**observation, MASK: legal != 0}", "pass"),
        ("masks in infos overlooked", "elif MASK in info:", "elif False:"),
        (
            "actions of the first columns",
            "actions[columns, : math.prod(shape)]",
            "actions[: len(columns), : math.prod(shape)]",
        ),
        ("parts of all kinds", 'if f"{name}.".startswith(f"{kind}.")]', "]"),
        ("widths unchecked", "if not count or num_columns % count:", "if not count:"),
    ],
    "beast/envs/groups.py": [
        ("steps of who is not there", "games.steps + ~absent", "games.steps + 1"),
        ("games of who never came", " & (lengths > 0)", ""),
        ("numbers of a game in all rows behind it", "newly_over = game_over & ~absent", "newly_over = game_over"),
        ("rows behind an end begin a game", "comes, was_over = (new_game & ~absent)", "comes, was_over = (new_game)"),
        ("the success of who has ended is forgotten", "np.where(is_held, self._objective, told)", "told"),
        ("the success of the game before", "self._absent(info) & (self._games.steps > 0)", "self._absent(info)"),
        ("success in the same step lost", 'if "final_info" in info:', "if False:"),
        ("who comes late has the steps of the game before", "(comes | begins.reshape(-1, 1))", "(comes)"),
        ("who is absent at the reset begins", '"done": ~absent, "terminated": absent', '"done": True'),
        ("infos of one environment taken for a vector env's", "info.keys() != FINAL:", "False:"),
        (
            "a close that hangs waited for",
            "            signal.setitimer(signal.ITIMER_REAL, seconds)",
            "            pass",
        ),
        ("lost last observations not noticed", "bool((lost & ~terminated).any())", "False"),
        ("rewards in lists refused", "(np.ndarray, list, tuple)", "(np.ndarray,)"),
        (
            "what does not fit later is not named",
            "if found := misfit_observation(space, observation):",
            "if found := None:",
        ),
        (
            "termination and truncation swapped",
            '"terminated": terminated, "truncated": truncated,',
            '"terminated": truncated, "truncated": terminated,',
        ),
        (
            "termination for done",
            "reward, ended, game_over, absent, self._agents",
            "reward, terminated, game_over, absent, self._agents",
        ),
        ("done beside an end", "games.was_final & ~ended, ", "games.was_final, "),
        ("reward of a void step", "xp.where(new_game, 0.0, reward)", "reward"),
        (
            "steps of an episode from 1",
            "xp.where(new_game, 0, games.steps + ~absent)",
            "xp.where(new_game, 1, games.steps + ~absent)",
        ),
        ("return of the life for that of the game", "game_over = ended & ~life_over", "game_over = ended | life_over"),
        ("a new game without its return", "xp.where(new_game, 0.0, games.returns + reward)", "games.returns + reward"),
        ("last observation of the first environment", "final[k]", "final[0]"),
        ("the next episode's mask for a last observation", 'info.get("final_info", {})', "info"),
        ("last observations of dicts of the first environment", "name: part[k] for", "name: part[0] for"),
        ("last observation in the wrong column", "fields[name][k] = part", "fields[name][0] = part"),
        ("same-step return without its last reward", 'np.where(same_step, rows["reward"][1:], 0)', "0"),
        ("same-step length one short", 'rows["episode_step"][:-1] + same_step', 'rows["episode_step"][:-1]'),
        ("a lost life told as a game", "[:-1] & begins  # [T, K]", "[:-1]  # [T, K]"),
        ("done of a reset", '"done": ~absent, "terminated"', '"done": absent, "terminated"'),
        ("index behind its space taken", "(values >= high)", "(values > high)"),
        ("index before its space taken", "(values < low) | ", ""),
        ("indices of last observations unchecked", "self._check_limits(fields, found)", "pass"),
        ("infos below a wrapper fail", "_tolerate(each)", "pass"),
        ("rewards of shape (1,) refused", "view(_Rewards)", "view()"),
        ("others stay open", "single.close()", "pass"),
    ],
    "beast/envs/emulator.py": [
        ("games off the list taken", "if not unlisted and (reason := why_not(game)):", "if False:"),
        ("other arguments swallowed", "        refuse_unknown(others)", "        pass"),
        ("stepped when closed", "        if self.closed:", "        if False:"),
        ("a first mask of all refused", "(self._received is None and not mask.all())", "self._received is None"),
        ("states that are no bytes", "if not isinstance(state, bytes):", "if False:"),
        (
            "ragged lists told by NumPy",
            "    except ValueError:\n        return np.empty((), object)",
            "    except OSError:\n        raise",
        ),
    ],
    "beast/envs/tensors.py": [
        ("an environment in arrays taken for one of tensors", "is_torch and not isinstance(env, OfArrays)", "is_torch"),
        ("tensors left open", "            self.of_tensors.close()", "            pass"),
        ("a reset without its seed", "self.of_tensors.reset(seed=seed)", "self.of_tensors.reset(seed=0)"),
    ],
    "beast/feeds/memory.py": [
        ("rows that nobody wrote look like zeros", 'else np.iinfo(dtype).max if kind in "iu" else True', "else 0"),
        ("final observations poisoned", 'return 0 if name.startswith("final_obs/") else poison', "return poison"),
        ("rollouts do not overlap", "array[slot, 0] = array[previous, -1]", "pass"),
    ],
    "beast/feeds/device.py": [
        ("slots that do not fit begun", "if self.num_bytes > free:", "if False:"),
        (
            "environments elsewhere taken",
            "(env.device.type, env.device.index or 0) != (",
            "False and (env.device) != (",
        ),
        ("environments of another number taken", "if env.num_envs != memory.group_width:", "if False:"),
        ("a first row that begins nothing", '"done": True}', '"done": False}'),
        ("lives for games", 'ended & ~info["life_over"] if "life_over" in info else ended', "ended"),
        ("numbers of games in all rows", "double().where(game_over, 0).sum()", "double().sum()"),
        ("numbers of lives", "game_over, 0).sum(), game_over.sum()", "ended, 0).sum(), ended.sum()"),
        ("only the latest numbers", "self._told[name] + told if name in self._told else told", "told"),
        ("numbers told twice", "told, self._told = self._told, {}", "told = self._told"),
        ("last observations that there are not", "terminated | (truncated & ~has_last)", "terminated"),
        (
            "last observations that are not valid",
            'info.get("_final_obs", torch.ones_like(ended))',
            "torch.ones_like(ended)",
        ),
        ("last observations not written", 'self._write(info["final_obs"], arrays, "final_obs")', "pass"),
        ("shapes unchecked", "elif part.shape != arrays", "elif False and part.shape != arrays"),
        ("actions from 0", "(actions.reshape(-1, *shape) + start)", "actions.reshape(-1, *shape)"),
        ("bounds not scaled to", "low + (actions + 1) / 2 * (high - low), actions)", "actions, actions)"),
        ("bounds exceeded", "torch.clamp(inside, low, high)", "inside"),
        ("parts of an action mixed", "zip(keys, actions.split(", "zip(keys[::-1], actions.split("),
        ("one seed for all groups", "[seed(number, 0) for number", "[seed(0, 0) for number"),
        ("groups stay open", "self._to_close.callback(group.close)", "pass"),
        ("nobody is woken", "self._is_awake.set()", "pass"),
        ("all columns of the first task", 'computed["task"] = self._task', 'computed["task"] = 0'),
        ("nobody looks for errors", "            self.env.check()", "            pass"),
    ],
    "beast/gpu/atari.py": [
        ("all consoles begin anew", "(mask.to(torch.uint8) * (", "(torch.ones_like(mask, dtype=torch.uint8) * ("),
        ("a seed that begins nothing anew", "(1 if seed is None else 2)", "1"),
        (
            "seeds of other consoles",
            "self._seed(checked_seeds(seed, len(chosen)), chosen",
            "self._seed(checked_seeds(seed, len(chosen)), chosen.flip(0)",
        ),
        ("the same start frames for all", "[:, consoles] = lengths.T", "[:, consoles] = lengths.T[:, :1]"),
        (
            "the same generator for all",
            "view(self.num_envs, -1)[consoles] = generators",
            "view(self.num_envs, -1)[consoles] = generators[:1]",
        ),
        ("ALE's generator never", "exact and host.settings", "False and host.settings"),
        ("frames that end early stay", '("emulate", "emulate_again", "observe")', '("emulate", "observe")'),
        ("last observations of all", "self._ends[0] | self._ends[1]", "self._ends[0]"),
        ("errors pass", "        if errors.any():", "        if False:"),
        ("another console named", "console = int(errors.nonzero()[0])", "console = 0"),
        ("actions of any number", "or actions.shape != (self.num_envs,):", ":"),
        ("steps before a reset", "        if not self._was_reset:", "        if False:"),
        ("other memory than RAM", "begin = self._shared.host.ram_offset", "begin = 0"),
        ("unaligned ROMs", "begin = -memory.data_ptr() % ALIGNMENT", "begin = 64 - memory.data_ptr() % ALIGNMENT"),
        ("the constants missing", "self.constants[name].copy_(", "torch.clone("),
        ("compiled for another cartridge", "known_games()[game]['wiring']", "'kFlat'"),
        ("multiplied and added at once", ', "--fmad=false"]', "]"),
    ],
    "beast/gpu/kernels.py": [
        ("headers that do not matter", 'b"\\0".join([*texts, ', 'b"\\0".join(['),
        ("options that do not matter", "repr((*options, architecture,", "repr((architecture,"),
        ("one architecture for all", "repr((*options, architecture, version", "repr((*options, version"),
        ("nothing is kept", "if not (kept.exists() and log_of_it.exists()):", "if True:"),
        ("errors of the compiler pass", "if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:", "if False:"),
    ],
    "beast/gpu/tasks.py": [
        ("columns of a task beside each other", "torch.stack(parts, dim=1).flatten(0, 1)", "torch.cat(parts)"),
        ("one seed for all tasks", "seed + env.num_envs", "seed"),
        ("actions of another task", "env.step(actions[columns])", "env.step(actions[: env.num_envs])"),
        ("no task is looked at", "            env.check()", "            pass"),
    ],
    "beast/envs/atari.py": [
        ("lives begin with any action", "actions[self._life_over] = self._first_action", "pass"),
        ("actions of the caller changed", "np.array(actions) if isinstance(", "actions if isinstance("),
        (
            "lives of this step",
            'self._lives = info["lives"] + 0\n        info',
            'self._lives = info["lives"]\n        info',
        ),
        ("a test refuses what a GPU takes", "if name not in GPU_ARGUMENTS}", "if True}"),
    ],
    "beast/envs/probe.py": [
        ("tried with a small seed", "checked.reset(seed=SEED)", "checked.reset(seed=0)"),
        ("seeded twice", "group.reset(None, row)", "group.reset(SEED, row)"),
        ("signature not told", '"reset() got an unexpected keyword argument" in str(error)', "False"),
        ("tried beyond an end", "if was_ended or time", "if time"),
        ("forbidden actions tried", "random, allowed)", "random)"),
        ("masks that say something else taken", "check_mask(action, mask, self._before[0])", "pass"),
    ],
    "beast/envs/spaces.py": [
        ("boards of four rows that are images", "channels)[1:]) >= 5", "channels)[1:]) >= 3"),
        ("one dtype for all kinds", 'dtypes[0] if len(set(dtypes)) == 1 else "float64"', "dtypes[0]"),
        (
            "the width of the first kind",
            "return max(map(policy_width, space.values()))",
            "return policy_width(next(iter(space.values())))",
        ),
        ("masks of other kinds", "legal if legal is None else legal[columns]", "None"),
        ("values that change by a cast taken", "(array.astype(dtype) == array).all()", "True"),
        ("shapes unchecked", "is_fit &= array.shape == shape", "is_fit &= True"),
        ("masks inverted", "np.reshape(allowed, scores.shape) != 0", "np.reshape(allowed, scores.shape) == 0"),
        ("parts of a Dict all begin at the first", "first += width", "first += 0"),
        ("categories not compared", "{name: str(space) for", "{name: '' for"),
    ],
    "beast/envs/doom.py": [
        ("the only weapon earns", "        held=0,", ""),
        ("hits cost nothing in small duels", '"HEALTH": (0, -0.01)}', '"HEALTH": (0, 0)}'),
        ("a crashed game has a result", 'info |= {} if crashed else {"true', 'info |= {"true'),
        ("telefrags drown all", 'max(now["HEALTH"], 0.0)', 'now["HEALTH"]'),
        (
            "time limits that terminate",
            "return observation, reward, is_over, is_cut, info",
            "return observation, reward, is_over or is_cut, False, info",
        ),
        (
            "crashes that terminate",
            "0.0, False, True, self._player.final_info(crashed=1)",
            "0.0, True, False, self._player.final_info(crashed=1)",
        ),
        (
            "steps that outlast the limit",
            "tics = min(self._frames, self._scenario.limit - self._tics)",
            "tics = self._frames",
        ),
        ("counters from the start of the game", "- self._first.variables[counter]", ""),
        (
            "gains without a limit",
            "min(now[name] - before[name], LARGEST.get(name, math.inf))",
            "now[name] - before[name]",
        ),
        ("a dead player's return is paid", 'or (before["DEAD"] and not now["DEAD"])', ""),
        ("the first step is paid", "is_over or not before or", "is_over or"),
        ("turns mirrored", "(*(-x for x in degrees), *degrees)", "(*degrees, *(-x for x in degrees))"),
        ("negative measurements", "np.maximum(numbers, 0)", "np.array(numbers)"),
        ("rewards without their scale", "self._scenario.scale * reward", "reward"),
        (
            "health that falls heals, too",
            'seen.variables["HEALTH"] > self.seen',
            'seen.variables["HEALTH"] != self.seen',
        ),
        ("a weapon counts at once", "self._weapons == [weapon] * HELD_STEPS and", ""),
        ("a weapon without ammunition counts", 'and now["SELECTED_WEAPON_AMMO"] > 0', ""),
        ("pixels of the row above", "self.seen.screen.reshape(-1)", "np.roll(self.seen.screen, 1, 0).reshape(-1)"),
    ],
    "beast/envs/doom_match.py": [
        (
            "matches begin with dead players",
            'if not any(game.seen().variables["DEAD"] for game',
            'if True or not any(game.seen().variables["DEAD"] for game',
        ),
        ("a scenario's own rules lost", '{RULES} {self._scenario.rules}"', '{RULES}"'),
        ("a tie wins", "float(frags[seat] > most)", "float(frags[seat] >= most)"),
        ("bots do not count", " + self._players[0].of_bots()", ""),
        (
            "matches that terminate",
            "return dict.fromkeys(agents, False), dict.fromkeys(agents, is_cut)",
            "return dict.fromkeys(agents, is_cut), dict.fromkeys(agents, False)",
        ),
        ("all do what the first one does", "act(held[seat], 1,", "act(held[0], 1,"),
        ("all see what the first one sees", "seen = [game.seen() for", "seen = [self._games[0].seen() for"),
        ("a match outlasts its limit", "self._scenario.limit - self._tics)", "9)"),
        (
            "a match goes on after a crash",
            "            self.agents = []\n            observations",
            "            observations",
        ),
    ],
    "beast/envs/doom_game.py": [
        ("an older arena kept", "if not path.exists() or path.read_bytes() != arena():", "if not path.exists():"),
        ("hung games are waited for", "time.monotonic() > self._due and self._pid", "False and self._pid"),
        ("games outlive their process", "kill -9 ", "echo "),
        ("files outlive their games", 'rm -f "$file"', "true"),
        ("a folder is left behind", "rmdir _vizdoom", "true"),
        ("seeds unused", "self._game.set_seed(seed)", "pass"),
        ("VizDoom's own time limit", "game.set_episode_timeout(0)", "pass"),
    ],
    "beast/envs/numbers.py": [
        ("locks not asked for", "fcntl.lockf(_file, fcntl.LOCK_EX | fcntl.LOCK_NB, num_envs, first)", "pass"),
        ("own numbers given again", "_taken.add(numbers)", "pass"),
        ("numbers never given back", "_taken.discard(numbers)", "pass"),
    ],
    "beast/feeds/processes.py": [
        ("the mark is not its own", '    begin_family(os.environ.get(FAMILY, ""))\n', ""),
        ("games in their own sessions left", "kill_family(None, self.mark)", "pass"),
    ],
    "beast/feeds/slots.py": [
        ("newest rollouts first", "self._full.popleft()", "self._full.pop()"),
        ("slot of a group that waits taken", "for slot in self.free if slot not in avoid", "for slot in self.free"),
        ("slot still free", "            self.free.remove(slot)\n", ""),
        ("slots as early as can be", "if not allowed or self._is_early() or", "if not allowed or"),
        ("as much for each slot of a batch", "(begun - begun % self._at_once)", "begun"),
        ("as many at once as came last", "max(self._at_once, count)", "1"),
        ("no time to spare", "self._to_fill.mean + DEVIATIONS * self._to_fill.deviation", "self._to_fill.mean * 0.8"),
        ("first durations for ever", "self.mean += RECENT", "self.mean += 0"),
        ("deviations of nothing", "abs(value - self.mean) - self.deviation", "0"),
        ("a column is an update", "self._trains_since) / self._training", "self._trains_since)"),
        ("nobody acts where one hangs", "return not self._wanted or time", "return True or time"),
        (
            "who hangs counts",
            "sum(count < MOST_OVERTAKEN for count in self._overtaken.values())",
            "len(self._overtaken)",
        ),
        ("nobody overtakes", "self._overtaken[earlier] += 1", "pass"),
        ("taken, and not ahead", "self._untrained += count * self._width", "pass"),
        ("given up, and counts", "self._untrained -= self._width", "pass"),
        (
            "columns named in reverse",
            "torch.arange(memory.group_width)",
            "torch.arange(memory.group_width).flip(0)",
        ),
        (
            "row 0 repeats the row before the last",
            "tensor[slot, 0] = tensor[previous, -1]",
            "tensor[slot, 0] = tensor[previous, -2]",
        ),
        (
            "uploads the row before",
            "[[x[name][slot, row] for",
            "[[x[name][slot, row - (x is self._shared)] for",
        ),
        (
            "downloads the row before",
            'copy_(self._tensors["action"][slot, row], non',
            'copy_(self._tensors["action"][slot, row - 1], non',
        ),
        ("batches are the slots themselves", "x.clone() for name, x in views", "x for name, x in views"),
        ("a learner before the actor in lock step", "and self._may_take)", ")"),
        ("rollouts as close as they come", " or self._is_too_soon(rows):", ":"),
        ("as if all groups made rows", "self._spacing * len(self._overtaken)", "self._spacing * 4"),
        ("rows of one that hangs waited for", "max(self._begun) < self._to_fill.mean", "max(self._begun) < math.inf"),
        ("close after a while, in lock step, too", "return self._lock_step or time", "return time"),
        ("actions of the rollout before", "self._tensors[name][slot, 0] = 0", "pass"),
    ],
    "beast/feeds/shared_memory.py": [
        ("a group that waits sleeps on", "self.actors.wake()  # groups", "pass  # groups"),
        ("trained, and ahead", "self.slots.train(width)", "pass"),
        (
            "actions written to the row that they follow",
            "row = self.tensors.row(group.slot, group.row)\n            answers",
            "row = self.tensors.row(group.slot, group.row - 1)\n            answers",
        ),
        (
            "core state of the first group",
            "tuple(state[:, mine] for state in core_state)",
            "tuple(state[:, :width] for state in core_state)",
        ),
        (
            "actions of the first group",
            "[x[:, mine] for x in answers]",
            "[x[:, :width] for x in answers]",
        ),
        (
            "rollouts begin with an empty core state",
            "self._initial_states[slot] = group.core_state",
            "self._initial_states[slot] = self._new_state",
        ),
        ("core states of the first columns", "state[:, first : first + width]", "state[:, :width]"),
        (
            "slot of a lost group never free",
            "                self.slots.give_up(group.slot)\n",
            "                pass\n",
        ),
        (
            "slot of a full rollout free while its group waits",
            "if group.slot != NO_SLOT and number not in self._starving:",
            "if group.slot != NO_SLOT:",
        ),
        ("slot free before it is trained on", "is_copy = len(taken) > 1", "is_copy = True"),
        ("slot of a dropped rollout never free", "                    self.slots.give_up(slot)\n", ""),
        ("lag of the newest action", "            if group.row == 0:\n", "            if True:\n"),
        ("lag of the first update on a slot", "+ updates_of_a_slot - 1 -", "-"),
        ("lives not counted", "Group(life=group.life + 1)", "Group(life=group.life)"),
        ("rows counted from the first rollout on", "        self._rows_since = 0\n        self.t", "        self.t"),
        ("environments reset one after the other", "math.inf if previous == NO_SLOT else self._rows", "self._rows"),
        ("one row of several groups", "self._rows_since += len(numbers)", "self._rows_since += 1"),
        ("rollouts a rollout apart", "memory.unroll_length / actors.num_groups if", "memory.unroll_length if"),
        (
            "core states of joined rollouts in reverse",
            "self._initial_states[slot] for slot in taken",
            "self._initial_states[slot] for slot in reversed(taken)",
        ),
    ],
    "beast/hosts/wire.py": [
        ("byte order", 'newbyteorder("<")', 'newbyteorder(">")'),
        ("arrays column by column", ".reshape(shape)\n\n\ndef nest", '.reshape(shape, order="F")\n\n\ndef nest'),
        ("tuples in reverse", "for part in structure.tuple.parts)", "for part in reversed(structure.tuple.parts))"),
        ("the next array", "return leaves[structure.field]", "return leaves[structure.field - 1]"),
        ("bounds swapped", 'for name in ("low", "high"))  #', 'for name in ("high", "low"))  #'),
        ("bounds of the first number", "numbers[0] if len(set(numbers)) == 1 else numbers", "numbers[0]"),
        ("choices from 0", 'start=description["start"], **extra)', "**extra)"),
        ("joint choices from 0", 'dtype.type, start=description["start"])', "dtype.type)"),
        ("parts of a Dict sorted", "for key, part in space.items()]}", "for key, part in sorted(space.items())]}"),
    ],
    "beast/hosts/throttle.py": [
        ("guesses of each address", 'partition("%")[0], 64)', 'partition("%")[0], 128)'),
        ("guesses without a limit", "+ FREE_GUESSES - 1", "+ 1e9"),
    ],
    "beast/hosts/dialer.py": [
        ("a server that dials deflates nothing", ", self._dialer.deflate)", ")"),
        ("one refusal ends all", "if self.refusals.keys() >= set(self.addresses):", "if self.refusals:"),
        ("an expired certificate without a remedy", '"CERTIFICATE_VERIFY_FAILED" in details or', "False or"),
        ("a lost learner told at each call", "time.monotonic() > told + RETOLD_SECONDS", "True"),
    ],
    "beast/machine.py": [
        ("others of an inherited mark end", "os.getpid(), _mark", 'os.getpid(), os.environ.get(FAMILY, "")'),
        ("no time to close", "CLOSING_SECONDS = 10.0", "CLOSING_SECONDS = 0.3"),
        ("what environments have left lives", "kill_family()  # before", "pass  # before"),
        ("threads of environments waited for", "os._exit(status[0])", "time.sleep(1000)"),
        ("status of an error", "status = [1]", "status = [0]"),
    ],
    "beast/learn/demonstrations.py": [
        ("last action of its own row", "np.roll(target, 1, 0)", "target"),
        ("last reward of its own row", 'np.roll(checked["rewards"], 1)', 'checked["rewards"]'),
        (
            "episodes begin where they end",
            'np.append(True, checked["episode_ends"][:-1] != 0)',
            'checked["episode_ends"] != 0',
        ),
        ("choices not checked", "is_right &= (cast >= low) & (cast < low + choices(space))", "pass"),
        ("bounds of actions not checked", "is_right &= (cast >= space.low) & (cast <= space.high)", "pass"),
        ("masks not checked", "_check_legal(path, env_spaces.action, checked[names[MASK]], target)", "pass"),
        ("actions not counted from 0", 'x - getattr(part, "start", 0)', "x"),
        ("columns share an episode's place", "random.permutation(len(pieces))", "range(len(pieces))"),
        ("columns begin anew in each batch", "itertools.chain.from_iterable(deck) for _", "iter(pieces[0]) for _"),
    ],
    "beast/feeds/actor.py": [
        ("messages of threads amidst others", "            with lock:\n    ", ""),
        ("processes send, too", "if os.getpid() == owner:", "if lock:"),
    ],
    "beast/hosts/served_group.py": [
        ("fields one byte early", "memory, size - layout.itemsize)", "memory, size - layout.itemsize - 1)"),
        ("a stack that has shifted in one pixel", "reshape(len(field), -1).all(1)", "reshape(len(field), -1).any(1)"),
        (
            "a stack that has shifted in any environment",
            "(newest[env] if is_shifted[env]",
            "(newest[env] if is_shifted.any()",
        ),
        ("the newest frames as they are", "field[:, -1] ^ last[:, -1]", "field[:, -1]"),
        ("stacks of the first message", "            last[...] = field\n", ""),
        ("stacks of another stream", "        self._last.clear()\n", ""),
        ("stacks of the learner before", "        self.row.begin()\n", ""),
        ("metrics left out of deflated rows", "deflated=deflated, metrics=self.metrics)", "deflated=deflated)"),
        ("every stream with one seed", "hello.seed % (2**31 - self.num_envs)", "0"),
        ("seeds beyond 31 bits", "seed % (2**31 - self.num_envs)", "seed % 2**32"),
        ("one environment fewer than the hello says", "(num_envs, *shape))", "(max(num_envs - 1, 1), *shape))"),
        (
            "final observations under the names of the others",
            'name.removeprefix("obs/"): name',
            'name.removeprefix("final_").removeprefix("obs/"): name',
        ),
    ],
    "benchmarks/plan.py": [
        ("everyone is served at once", "max(now, self._free[0]) + service", "now + service"),
        ("who waits longest is overtaken", "heapq.heapreplace(self._free, leaves)", "self._free[0] = leaves"),
        ("rows arrive at once", "self.plan.round_trip_ms / 2e3 + own", "own"),
        ("rollouts without an age", "[group.versions / self.plan.unroll_length]", "[self.version]"),
        ("the queue holds as much as comes", "len(rank.queue) + self.plan.width <= self.queue_width", "True"),
        ("a pass for each group", "groups = list(rank.ready)", "groups = [rank.ready[0]]"),
    ],
    "beast/learn/replay.py": [
        (
            "replay of other weights taken",
            "replay.load(path, weights_digest(learner.net))",
            "replay.load(path, np.load(path)['version'].item())",
        ),
        ("replay in Fortran's order scrambled", "array.T[...] = ", "array.reshape(shape[::-1])[...] = "),
        ("replay of a remote run bounded", 'flags.save_replay or flags.feed == "remote"', "flags.save_replay"),
        ("replay of a saved run bounded", 'flags.save_replay or flags.feed == "remote"', 'flags.feed == "remote"'),
        (
            "last observations not stored",
            'if "/" in name or ROW_FIELDS[name].is_replayed}',
            'if (name[:4] == "obs/" if "/" in name else ROW_FIELDS[name].is_replayed)}',
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
        ("gradients of two ranks", ".mean() / ranks.size()  # the ranks'", ".mean()  # the ranks'"),
        ("updates of this rank's steps", "while ranks.all_of(limiter", "while (limiter"),
        (
            "updates of one rank's sequences",
            "flags.trained * ranks.size(), flags.min_fill",
            "flags.trained, flags.min_fill",
        ),
        ("a row left out behind a truncation", "target_state)[2], t + 1\n", "target_state)[2], t + 2\n"),
        ("a row twice behind a truncation", "target_state)[2], t + 1\n", "target_state)[2], t\n"),
        (
            "its own target network",
            "compute_loss(flags, net, learner.target, batch)",
            "compute_loss(flags, net, net, batch)",
        ),
        (
            "importance weights ignored",
            "(sample.weights * 0.5 *",
            "(0.5 *",
        ),
        (
            "generations of now",
            "replay.update(batch.sample.ids, batch.sample.generations,",
            "replay.update(batch.sample.ids, replay.generation_of(batch.sample.ids),",
        ),
        (
            "columns that evaluate in the ratio",
            "is_step, is_step[:, : replay.width].sum()",
            "is_step, is_step.sum()",
        ),
        (
            "steps without the columns that evaluate",
            "count_steps(rollout, is_step,",
            "count_steps(rollout, is_step[:, : replay.width],",
        ),
        ("greedy at epsilon 1 takes action 0", "min(self.flags.epsilon, 1 - 1e-6)", "self.flags.epsilon"),
        ("--epsilon ignored by a test", 'own=("epsilon",)', "own=()"),
        (
            "last action never explored",
            "device=q.device).masked_fill(q == -math.inf, -1)",
            "device=q.device).masked_fill(q == q[..., -1:], -1)",
        ),
        ("illegal actions explored", ".masked_fill(q == -math.inf, -1)", ""),
        ("epsilon of illegal actions", "q != -math.inf", "q == q"),
        ("mask ignored", 'q = mask_logits(self.action_layout, q, inputs["obs"].get(MASK))', "pass"),
        (
            "one coin for a group",
            "coin = torch.rand(epsilon.shape, generator",
            "coin = torch.rand((), generator",
        ),
        (
            "one draw for a group",
            "rand(q.shape, generator=training.generator, device=q.device)",
            "rand(q.shape[2:], generator=training.generator, device=q.device).expand(q.shape)",
        ),
        ("returns not resumed", 'self.all_returns.extend(state["all_returns"])', "pass"),
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
            "limiter.may_update() and replay.num_sequences() > 0 and",
            "limiter.may_update() and",
        ),
        ("signed errors", '"losses/td_error": errors.abs().sum()', '"losses/td_error": errors.sum()'),
        (
            "returns of the columns that count",
            "for episode_return, _ in finished_episodes(rows))",
            "for episode_return, _ in finished_episodes({name: x[:, -1:] for name, x in rows.items()}))",
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
        ("bad update not skipped", "step_unless(learner.optimizer, is_bad)", "learner.optimizer.step()"),
    ],
}
MUTANTS += [
    Mutant(f"{Path(file).stem}: {name}", old, new, file)
    for file, mutants in OTHER_MUTANTS.items()
    for name, old, new in mutants
]


class Run:
    """The tests on a mutant, or on the files as they are, in a child process that finds torch already imported."""

    def __init__(self, tests: list[str], mutant: Mutant | None = None):
        self.mutant, self.began = mutant, time.monotonic()
        self.place = tempfile.TemporaryDirectory()
        place = Path(self.place.name)
        for folder in ("beast", "benchmarks", "compat", "csrc", "docs", "examples", "tests"):
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / folder, place / folder, ignore=ignored)
        for path in (*ROOT.glob("*.py"), *ROOT.glob("lib*.so"), ROOT / "pyproject.toml"):
            shutil.copy(path, place)
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
        failed = re.search(r"^(?:FAILED|ERROR) tests/([\w.]+::\w+)", output, re.MULTILINE)
        if status != 0 and not failed:  # what cannot even be imported says nothing about the tests
            raise RuntimeError(f"{self.mutant or 'no mutant'}: no test has failed, but pytest:\n{output}")
        return failed[1] if failed else "", time.monotonic() - self.began


def stale_texts(mutants: list[Mutant]) -> list[str]:
    """The mutants whose files have changed, for people to read."""
    found = [(mutant, (ROOT / mutant.file).read_text().count(mutant.old)) for mutant in mutants]
    return [f"{m.file}: {m.name} ({count} times): {m.old}" for m, count in found if count != 1]


def main() -> None:
    text = "".join(path.read_text() for path in ROOT.glob("tests/test_*.py"))
    names = re.findall(r"^def (test_\w+)", text, re.MULTILINE)
    if unknown := [word for word in SLOW.split(" or ") if not any(word in name for name in names)]:
        sys.exit(f"No test's name has {', '.join(unknown)}: mend SLOW in {__file__}.")
    words = sys.argv[1:]
    chosen = [
        mutant for mutant in MUTANTS if not words or any(word in f"{mutant.file}: {mutant.name}" for word in words)
    ]
    if not chosen:
        sys.exit(f"No mutant's file or name contains {' or '.join(words)}.")
    if stale := stale_texts(chosen):
        problem = (
            f"These texts do not occur exactly once in their files, which have changed; change {__file__} with them:"
        )
        sys.exit("\n".join([problem, *stale]))
    for mutant in chosen:  # what is no program says nothing about the tests
        compile((ROOT / mutant.file).read_text().replace(mutant.old, mutant.new), mutant.name, "exec")
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
