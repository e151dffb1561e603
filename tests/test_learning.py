"""Small tasks that an untrained agent cannot do, learned by the program that users start."""

import pytest
import toy_envs  # noqa: F401  registers its environments
from lock_step import metrics_of

import monobeast
from benchmarks.learning import TASKS

pytestmark = pytest.mark.long


@pytest.fixture
def train(tmp_path, run_main):
    """A function of a benchmark task and a number of steps, fewer than it has there: the returns, one for each row of
    metrics."""

    def train(task: str, total_steps: int) -> list[float]:
        flags = f"{TASKS[task]} --root {tmp_path} --name run --log_steps 5000 --no_tensorboard --deterministic"
        code, output = run_main(monobeast, *flags.split(), "--total_steps", str(total_steps))
        assert code == 0, output
        return [float(row["charts/episodic_return"]) for row in metrics_of(tmp_path / "run")]

    return train


def test_cartpole_is_learned(train):
    returns = train("cartpole", 120_000)
    assert returns[0] < 40, "a random policy balances for 22 steps"
    assert returns[-1] > 150, returns  # means of 100 games; seeds 1 to 3: 284, 213, 362


def test_the_memory_task_is_learned_with_an_lstm(train):
    returns = train("memory-lstm", 80_000)
    assert max(returns[:2]) < 0.6, "without a memory half of the answers are wrong: 0"
    assert returns[-1] > 0.8, returns
