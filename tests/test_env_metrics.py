"""Numbers that environments tell of their games, and what training tells environments."""

import dataclasses
import json
import os
import re
import sys
import threading
import types
from fractions import Fraction
from multiprocessing import forkserver
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import toy_envs
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from lock_step import LockStep, metrics_of, new_learner, small_flags
from PIL import Image
from waiting import PATIENCE, wait_until

import monobeast
from beast.envs import env_metrics, films, progress, training_progress
from beast.envs.env_metrics import EnvMetrics
from beast.envs.groups import EnvGroup
from beast.envs.probe import probe_env
from beast.errors import InputError
from beast.feeds.actor import READY
from beast.feeds.actors import ActorProcess
from beast.feeds.memory import RolloutMemory
from beast.run import checkpoint
from beast.run.evaluation import Evaluations
from beast.run.metrics import Metrics
from beast.run.training import Training, consumer_of

ROOT = Path(__file__).resolve().parent.parent
SMALL = dict(env="toy_envs:Telling-v0", hidden_size=16, group_width=2, batch_width=2, tensorboard=False)


def games_of(env: VectorEnv, steps: int, names: str = "") -> list[tuple[int, dict]]:
    group = EnvGroup(env, metrics=names)
    memory = RolloutMemory(group.fields, 1, 1, env.num_envs)
    group.reset(0, memory.row(0, 0))
    games = []
    for _ in range(steps):
        group.step(np.zeros(env.num_envs, np.int64), memory.row(0, 1))
        games += group.ended
    group.close()
    return games


@pytest.mark.parametrize("vector_env", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_the_numbers_of_a_game_are_those_of_the_step_that_ended_it_in_both_conventions(vector_env, mode):
    env = vector_env([toy_envs.Telling] * 2, autoreset_mode=mode)
    games = games_of(env, 11, "found, nothing")
    assert [column for column, _ in games] == [0, 1] * 3 if mode == AutoresetMode.SAME_STEP else [0, 1] * 2
    for index, (_, numbers) in enumerate(games):
        game = index // 2
        expected = {"game": game, "level": 1.0, "half": 1.5, "steps": 0, "difficulty": -1, "is_success": game % 2}
        expected |= {"found/wood": 2, "found/iron": 0} | ({"late": 7} if game == 2 else {})
        assert numbers == expected


class Own(VectorEnv):
    """A vector env of a user's own, which resets in the same step; all games last one step."""

    def __init__(self, infos: dict):
        self.num_envs, self.infos = 2, infos
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions):
        ends = np.ones(2, bool)
        return np.zeros((2, 1), np.float32), np.zeros(2), ends, ~ends, self.infos


@pytest.mark.parametrize(
    "infos",
    [
        {"metrics": {"score": np.array([3, 4])}},
        {"metrics": {"score": [3, 4]}},
        {"metrics": np.array([{"score": 3}, {"score": 4}], dtype=object)},
        {
            "final_info": [{"metrics": {"score": 3}}, {"metrics": {"score": np.array([4])}}],
            "metrics": {"score": [9, 9]},
        },
        {"score": [3, 4]},
        {"score": [3, 4], "is_success": [1, 1], "_is_success": [False, False]},
    ],
)
def test_a_vector_env_of_a_users_own_may_tell_numbers_in_any_of_these_ways(infos):
    assert games_of(Own(infos), 1, "score") == [(0, {"score": 3.0}), (1, {"score": 4.0})]


def test_infos_that_are_none_and_numbers_of_any_type_are_taken():
    infos = {"final_info": [None, {"metrics": {"half": Fraction(1, 2), "tensor": torch.tensor([2.0])}}]}
    assert games_of(Own(infos), 1) == [(0, {}), (1, {"half": 0.5, "tensor": 2.0})]


def test_life_over_of_another_meaning_is_not_looked_at():
    assert games_of(Own({"is_success": [1, 0], "life_over": ["no", "yes"]}), 1) == [
        (0, {"is_success": 1.0}),
        (1, {"is_success": 0.0}),
    ]


def test_a_lost_life_ends_no_game():
    infos = {"is_success": [1, 1], "life_over": np.array([True, False])}
    assert games_of(Own(infos), 1) == [(1, {"is_success": 1.0})]


@pytest.mark.parametrize("bad", ["text", float("nan"), np.zeros(3), [[1], [2, 3]], object(), 1j, float("inf"), b"1"])
def test_a_bad_number_ends_nothing_and_is_told_once(bad):
    metrics = EnvMetrics()
    for _ in range(3):
        (_, numbers), _ = games_of(Own({"metrics": [{"bad": bad, "none": None, "good": 2}] * 2}), 1)
        metrics.add(env_metrics.encode([(0, numbers)]))
    assert metrics.take() == {"env/good": 2.0, "stats/env_games": 3}
    (complaint,) = metrics.complaints()
    assert complaint.startswith("warning: env/bad: no finite number: ") and len(complaint) < 120
    assert not metrics.complaints()
    assert "not one value for each" in dict(games_of(Own({"is_success": 1.0}), 1))[0]["is_success"]


def test_a_mean_is_over_the_games_that_have_told_a_number_since_the_last_row():
    metrics = EnvMetrics()
    assert metrics.take() == {}
    metrics.add(env_metrics.encode([(0, {"a": 1.0, "b": 5.0}), (3, {"a": 2.0}), (1, {})]))
    metrics.add(env_metrics.encode([(0, {"a": 6.0})]))
    assert metrics.take() == {"env/a": 3.0, "env/b": 5.0, "stats/env_games": 3}
    assert metrics.take() == {} and env_metrics.encode([(0, {})]) == b""


def test_what_an_env_server_sends_is_bounded_and_safe_to_show():
    metrics = EnvMetrics()
    hostile = [
        b"", b"[]", b"{", b"\xff", b"[" * 10_000, b'{"a": 1}', b'{"a": [1e999, 1]}', b'{"a": [1, 0]}',
        b'{"a": [NaN, 1]}', b'{"a": [1, 1e99]}', b'{"a": {}}', b'{"a": ["x", 1]}', b'{"a": [1' + b"0" * 9000 + b", 1]}",
    ]  # fmt: skip
    for encoded in hostile:
        metrics.add(encoded)
    assert metrics.take() == {} and len(metrics.complaints()) == 1
    metrics.add(json.dumps({"\x1b]0;title": "\x1b[31m\n" + 999 * "x"}).encode())
    (complaint,) = metrics.complaints()
    assert complaint.isprintable() and len(complaint) < 200
    for first in range(0, 1000, 10):
        metrics.add(json.dumps({f"name {first + i}" + 99 * "x": [1.0, 1] for i in range(10)}).encode())
    assert len(metrics.take()) <= env_metrics.MAX_NAMES + 1 and len(metrics.complaints()) == 1
    wide = {f"{i}" + 70 * chr(0x1F600): 1.0 for i in range(1000)}
    assert len(env_metrics.encode([(0, wide)])) < 2**15, "what a server may send"


def test_messages_of_an_actor_are_read_however_they_are_cut():
    sent = [(7, 1.0, 2.0, 0.5, b""), (65535, 0.5, 0.25, 0.0, b'{"a": [1, 1]}')]
    sent += [(1, 0.0, 0.0, 0.0, 70_000 * b"x"), (2, 0.0, 3.0, 1.0, b"")]
    data = b"".join(READY.pack(*numbers, len(told)) + told for *numbers, told in sent)
    for size in (1, 17, 18, 19, 100, 2**16, len(data)):
        process = ActorProcess(0, 2, 0)
        assert [
            message for at in range(0, len(data), size) for message in process.messages(data[at : at + size])
        ] == sent
        assert process.received == b""


def test_numbers_of_games_are_metrics_of_the_feed():
    test = LockStep(small_flags(**SMALL, env_metrics="found"))
    for _ in range(8):
        test.next_rollout()
    found = test.feed.measure(1.0, {})
    assert found["env/level"] == 1.0 and found["env/late"] == 7.0 and found["env/found/wood"] == 2.0
    assert 0 <= found["env/is_success"] <= 1 and found["stats/env_games"] > 8


def test_numbers_of_actor_processes_are_metrics_that_begin_late(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "tests")
    flags = small_flags(
        **SMALL, root=str(tmp_path), name="run", total_steps=3000, log_steps=100, deterministic=False, num_slots=0
    )
    monobeast.train(flags)
    rows = metrics_of(tmp_path / "run")
    last = next(row for row in reversed(rows) if row["env/game"])
    assert float(last["env/late"]) == 7.0 and float(last["env/steps"]) > 1000, "environments know the steps"
    assert max(float(row["env/steps"] or 0) for row in rows) <= int(rows[-1]["step"])


# -------------------------------------------------------------------------------------------- progress


def new_training(tmp_path, flags) -> Training:
    learner = new_learner(flags)
    return Training("mono", flags, learner, set(), frames_per_step=1)


@pytest.fixture(autouse=True)
def page():
    """A page, in a process that has followed none; afterwards that of this process is as it was before."""
    before = progress._newest, vars(progress._of_thread).copy()
    progress._newest = None
    vars(progress._of_thread).clear()
    os.environ.pop(progress.VARIABLE, None)
    yield progress.Page()
    progress._newest = before[0]
    vars(progress._of_thread).clear()
    vars(progress._of_thread).update(before[1])
    os.environ.pop(progress.VARIABLE, None)


def test_environments_know_steps_and_what_the_agent_tells_and_a_resumed_run_goes_on_with_it(tmp_path, page):
    assert training_progress() == (0, 1, {})
    flags = small_flags(**SMALL, root=str(tmp_path), name="run", total_steps=5000)
    with new_training(tmp_path, flags) as training:
        progress.follow(training.page)
        assert training_progress() == (0, 5000, {})
        training.tell(difficulty=0.25)
        training.learner.steps = 1234
        training._row_steps = 0  # a row of metrics is not due
        training.record(None)
        training.tell(other=2)
        assert training_progress() == (1234, 5000, {"difficulty": 0.25, "other": 2.0})
        for bad in ({"difficulty": float("nan")}, {f"name{i}": 1.0 for i in range(1000)}):
            with pytest.raises(InputError, match=r"training\.tell"):
                training.tell(**bad)
        training.save()
    with new_training(tmp_path, flags) as training:
        progress.follow(training.page)
        assert training_progress() == (1234, 5000, {"difficulty": 0.25, "other": 2.0})


def test_a_page_is_read_whole_while_it_is_written(page):
    texts = [b"", b"a" * progress.MAX_BYTES, b"b" * 100]
    reader, closed, seen = progress.Page(os.dup(page.fd)), threading.Event(), set()

    def write():
        while not closed.is_set():
            for text in texts:
                page.write(text)

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(3000):
        seen.add(reader.read())
    wait_until(lambda: seen.add(reader.read()) or len(seen) > 1)
    closed.set()
    thread.join()
    assert seen <= set(texts)
    page.write(texts[1])
    os.pwrite(page.fd, b"b" * 50, progress.HEAD.size)
    assert reader.read() == b"", "half of another text is written"


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"] if sys.platform == "linux" else ["fork"])
def test_processes_of_an_async_vector_env_see_how_far_training_is(page, context):
    if context == "forkserver":  # it is started by the first try of an environment, before there is a training
        forkserver._forkserver._stop()
        probe_env(lambda *_: AsyncVectorEnv([toy_envs.Telling] * 2, context=context), small_flags())
    progress.follow(page)
    env = AsyncVectorEnv([toy_envs.Telling] * 2, context=context)
    page.write(progress.encode(progress.Progress(77, 99, {"difficulty": 0.5})))
    games = games_of(env, 3)
    assert {(numbers["steps"], numbers["difficulty"]) for _, numbers in games} == {(77, 0.5)}


def test_the_curriculum_of_the_page_on_environments_makes_games_harder(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/environments.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "HeavyPole" in block]
    names: dict = {}
    exec(block, names)
    progress.follow(page)
    masses = []
    for difficulty in (0.0, 0.5):
        page.write(progress.encode(progress.Progress(1, 2, {"difficulty": difficulty})))
        games = games_of(SyncVectorEnv([lambda: names["HeavyPole"](gymnasium.make("CartPole-v1"))]), 20)
        masses.append(games[0][1]["mass"])
    assert masses == [0.1, 0.6]


@pytest.mark.parametrize(
    "text", [b"", b"null", b"{}", b"[1]", b"[1, 2, 3]", b'["a", 1, {}]', b"\xff", b"[1e999, 1, {}]"]
)
def test_a_progress_that_cannot_be_read_is_none(page, text):
    page.write(text)
    progress.follow(page)
    assert training_progress() == (0, 1, {})


# -------------------------------------------------------------------------------------------- env servers


@pytest.mark.parametrize("dials", [False, True])
def test_env_servers_tell_numbers_of_games_and_are_told_how_far_training_is(unix, page, dials):
    libbeast = pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast", exc_type=ImportError)
    from env_hosts import Dialing
    from pools import in_process_server

    from beast.feeds.remote import RemoteFeed
    from beast.hosts.served_group import VectorEnvGroup

    def make_group():
        return VectorEnvGroup(SyncVectorEnv([toy_envs.Telling] * 2), metrics="found")

    def tell(steps: int, difficulty: float) -> None:
        page.write(progress.encode(progress.Progress(steps, 99, {"difficulty": difficulty})))

    def act():
        for rows in feed.acting():
            zeros = torch.zeros(1, 2)
            rows.answer(zeros.long(), torch.zeros(1, 2, 2), zeros, 0, ())

    def train():
        for _ in feed.rollouts():
            pass

    seen = []
    add = EnvMetrics.add
    listener = libbeast.EnvListener(unix) if dials else None
    with Dialing(unix, make_group=make_group) if dials else in_process_server(make_group, unix):
        hello = listener.first_hello() if listener else libbeast.handshake(unix, timeout=PATIENCE)
        tell(5, 0.5)
        feed = RemoteFeed(
            consumer_of(new_learner(small_flags()), 0), spaces.Discrete(2), [] if dials else [unix], None, listener,
            unroll_length=3, group_width=2, batch_width=2, queue_width=2, inference_width=0, log=print, min_streams=1,
            progress=page.read, seed=7, expected=dict(hello), env_timeout=PATIENCE, connect_timeout=PATIENCE,
            max_env_restarts=0,
        )  # fmt: skip
        feed.env_metrics.add = lambda told: (seen.append(json.loads(told)), add(feed.env_metrics, told))
        threads = [threading.Thread(target=target, daemon=True) for target in (feed.pool.run, feed.watch, act, train)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: seen)
            assert seen[0]["steps"] == [10.0, 2] and seen[0]["difficulty"] == [1.0, 2], "the first game knows it, too"
            tell(6, 0.75)
            wait_until(lambda: seen[-1]["difficulty"] == [1.5, 2] and seen[-1]["steps"] == [12.0, 2])
            found = feed.measure(1.0, {"time/streams_enqueue": 0.0})
            assert found["env/level"] == 1.0 and found["env/late"] == 7.0 and found["env/found/wood"] == 2.0
        finally:
            feed.close()
            if listener:
                listener.close() if not threads[0].is_alive() else threads[0].join(PATIENCE)
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_numbers_that_nobody_reads_take_no_more_memory_than_so_much(unix):
    libbeast = pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast", exc_type=ImportError)
    with pytest.raises(ValueError, match="progress has 4001 bytes, at most 4000 are taken"):
        queue = libbeast.BatchingQueue()
        libbeast.ActorPool(1, queue, libbeast.DynamicBatcher(), [unix], ()).tell(4001 * b"x")


def test_streams_of_one_env_server_may_be_of_learners_that_are_not_equally_far():
    seen = {}

    def stream(steps: int) -> None:
        pages.append(progress.page_of_thread())
        pages[-1].write(progress.encode(progress.Progress(steps)))
        barrier.wait(PATIENCE)
        seen[steps] = training_progress().steps

    barrier, pages = threading.Barrier(2), []
    threads = [threading.Thread(target=stream, args=[steps]) for steps in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert seen == {3: 3, 4: 4}


# -------------------------------------------------------------------------------------------- evaluations


@pytest.fixture
def checkpoint_path(tmp_path):
    flags = small_flags(**SMALL, env_kwargs='{"level": 2}', env_metrics="found")
    learner = new_learner(flags)
    learner.steps = 1234
    state = {"config": dataclasses.asdict(flags), **learner.state_dict(), "told": {"difficulty": 0.5}}
    checkpoint.save(tmp_path / "checkpoint.pt", state)
    return tmp_path / "checkpoint.pt"


def test_test_mode_reports_the_numbers_of_its_games(checkpoint_path, page, capsys):
    flags = small_flags(**SMALL, mode="test", name="run", episodes=3, checkpoint=str(checkpoint_path))
    result = monobeast.test(flags)
    assert result == json.loads(checkpoint_path.with_name("test.json").read_text())
    means = {"game": 0.0, "level": 2.0, "half": 1.5, "steps": 1234, "difficulty": 0.5, "is_success": 0.0}
    assert result["env_metrics"] == means | {"found/wood": 2.0, "found/iron": 0.0}
    assert result["env_metrics_of_games"]["level"] == [2.0, 2.0, 2.0] and result["env_kwargs"] == '{"level": 2}'
    assert "env/level: 2, the mean of 3 games\n" in capsys.readouterr().out


def test_evaluations_may_be_on_several_arguments_of_the_environment_at_once(checkpoint_path, page):
    words = ('{"level": 3}', 'hard={"level": 9}', 'broken={"nope": 1}')
    flags = small_flags(
        **SMALL, mode="test", name="run", episodes=2, checkpoint=str(checkpoint_path), eval_env_kwargs=words
    )
    result = monobeast.test(flags)
    assert result["env_metrics"]["level"] == 3.0 and result["others"]["hard"]["env_metrics"]["level"] == 9.0
    assert "unexpected keyword argument 'nope'" in result["others"]["broken"]["error"]
    lines = []
    evaluations = Evaluations(checkpoint_path.parent, flags, 7, lines.append)
    evaluations._result_path = checkpoint_path.with_name("test.json")
    evaluations._process = types.SimpleNamespace(
        popen=types.SimpleNamespace(poll=lambda: 0, returncode=0), end=lambda patience: ""
    )
    found = evaluations.result()
    assert found["eval/episodic_return"] == found["eval/hard/episodic_return"] == 3.0
    assert found["eval/env/level"] == 3.0 and found["eval/hard/env/level"] == 9.0
    assert len(lines) == 1 and "the evaluation broken: " in lines[0]
    assert evaluations._command[-4:] == ["--eval_env_kwargs", *words]


@pytest.mark.parametrize("word", ["hard", "hard={", "a b={}", "env={}", "hard=[1]", "a/b={}"])
def test_arguments_of_evaluations_that_cannot_be_are_refused_before_the_run(word):
    with pytest.raises(InputError, match="--eval_env_kwargs"):
        small_flags(eval_env_kwargs=(word,))


def test_a_film_of_an_evaluation_and_the_hyperparameters_are_in_tensorboard(tmp_path, checkpoint_path, page):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    gif = tmp_path / "film.gif"
    flags = small_flags(**SMALL, mode="test", name="run", episodes=1, checkpoint=str(checkpoint_path), video=str(gif))
    monobeast.test(flags)
    with Image.open(gif) as image:
        assert image.n_frames == 3 and image.size == (30, 40)
    (tmp_path / "config.json").write_text(json.dumps({"learning_rate": 0.5, "env": "Pong", "widths": [1, 2]}))
    metrics = Metrics(tmp_path, None)
    metrics.film(77, gif)
    metrics.write(80, {"env/late": 1.0})
    metrics.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (film,) = events.Images("eval/film")
    assert (film.step, film.width, film.height) == (77, 30, 40) and film.encoded_image_string == gif.read_bytes()
    assert (
        "|learning_rate|0.5|" in events.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode()
    )
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["learning_rate"].number_value == 0.5 and values["env"].string_value == "Pong"


def test_a_long_film_has_every_second_frame_or_fewer(tmp_path):
    screen = np.zeros((1, 400, 200, 3), np.uint8)
    env = types.SimpleNamespace(metadata={"render_fps": 30}, render=lambda: screen)
    film = films.Film(env, str(tmp_path / "film.gif"))
    for number in range(1, 1001):
        screen[:] = number % 256
        film.add({"episode_step": np.array([number])})
    film.close()
    with Image.open(tmp_path / "film.gif") as image:
        assert 100 < image.n_frames <= films.GIF_FRAMES and image.size == (67, 134)
