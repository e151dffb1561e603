"""The actor pool with real env servers: its rollouts, losses of environments, refusals, and all the ways to end."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from concurrent import futures

import ends
import grpc
import numpy as np
import pytest
from env_hosts import ROOT, ServerProcess, Stream, array_message, make_certificate
from pools import (
    LIMIT,
    NO_MEMORY,
    UNROLL_LENGTH,
    ZEROS,
    Group,
    Learner,
    act_with_zeros,
    agent_that_remembers,
    check_contract,
    counting_group,
    hello,
    in_process_server,
    row_of,
)
from waiting import wait_until

import libbeast
from beast.envs.rows import written_by
from beast.hosts import wire

# ------------------------------------------------------------------------------------------- the rollout's contract


@pytest.mark.parametrize("width, num_streams", [(1, 1), (1, 3), (4, 1), (3, 2)])
def test_rollouts_overlap_by_a_row_go_on_without_a_gap_and_hold_the_state_before_row_zero(tmp_path, width, num_streams):
    flags = ["--group_width", str(width), "--max_streams", str(num_streams)]
    with ServerProcess(tmp_path, "toy_envs:Counting-v0", *flags) as server:
        addresses = [server.address] * num_streams
        with Learner(addresses, agent=agent_that_remembers, width=width, state=NO_MEMORY) as learner:
            check_contract(learner, width, num_streams)
            counters = learner.pool.counters()
        assert counters["streams_connected"] == num_streams and counters["restarts"] == 0
        assert learner.pool.count() >= 100 * num_streams * UNROLL_LENGTH * width
        assert learner.errors == learner.log == []


def test_a_row_tells_its_stream_life_and_environment_to_inference_and_to_the_learner(tmp_path):
    """Groups of 2, inference and batches as wide as they come; every environment shows the address that it is at."""

    def group_at(index):
        return Group({"at": ((), "int32")}, "at", lambda t: {"at": index}, num_envs=2)

    def agent(env_outputs, agent_state):
        return (np.zeros(tuple(env_outputs[1].shape), np.int64), *env_outputs[7:]), agent_state

    addresses = [f"unix:{tmp_path}/{index}" for index in range(2)]
    with in_process_server(lambda: group_at(0), addresses[0]), in_process_server(lambda: group_at(1), addresses[1]):
        with Learner(addresses, agent=agent, width=4) as learner:
            columns = set()
            while columns < {(0, 0), (0, 1), (1, 0), (1, 1)}:  # each stream to the left and to the right of a batch
                for (env_outputs, (_, *told)), _ in learner.rollouts(1):
                    at, group, life, env_number = (env_outputs[0], *env_outputs[7:])
                    assert str(group.dtype) == str(life.dtype) == str(env_number.dtype) == "torch.int32"
                    assert group.shape == life.shape == env_number.shape == (UNROLL_LENGTH + 1, 4)
                    np.testing.assert_array_equal(group, at)
                    assert (life == 0).all() and env_number.tolist() == [[0, 1, 0, 1]] * (UNROLL_LENGTH + 1)
                    for output, seen_by_agent in zip(env_outputs[7:], told):
                        np.testing.assert_array_equal(output[:-1], seen_by_agent[1:])
                    columns |= {(column // 2, int(at[0, column])) for column in (0, 2)}


def test_the_handshake_tells_what_the_pool_then_gets(tmp_path):
    with ServerProcess(tmp_path, "toy_envs:Dict-v0", "--group_width", "3") as server:
        spec = libbeast.handshake(server.address, timeout=60)
        assert spec["env"] == "toy_envs:Dict-v0" and spec["num_envs"] == 3 and spec["action"] == ("int64", ())
        assert spec["fields"]["obs/image"] == ("uint8", (8, 8, 1)) and spec["fields"]["done"] == ("bool", ())
        assert spec["observation"] == {"image": "obs/image", "number": "obs/number"}
        assert wire.space_from_json(spec["action_space"]).n == 4
        with Learner([server.address], width=3, env="toy_envs:Dict-v0") as learner:
            for ((observation, *_), _), _ in learner.rollouts(1):
                assert observation["image"].shape == (UNROLL_LENGTH + 1, 3, 8, 8, 1)


@pytest.mark.parametrize("flags", [(), ("--deflate",)])
def test_every_dtype_arrives_as_it_was_sent_from_transposed_arrays(tmp_path, flags):
    with ServerProcess(tmp_path, "server_toys:Dtypes-v0", "--group_width", "2", *flags) as server:
        with Learner([server.address], width=2) as learner:
            for (env_outputs, _), _ in learner.rollouts(3):
                for name in wire.DTYPES:
                    array, step = np.asarray(env_outputs[0][name]), np.asarray(env_outputs[3])
                    assert array.dtype == name
                    expected = (np.arange(6).reshape(3, 2).T + step[..., None, None]) % 2 == 0
                    np.testing.assert_array_equal(array, expected.astype(name))


@pytest.mark.parametrize("num_frames", [1, 2, 8, 9])
def test_stacks_of_frames_arrive_whole_though_deflated_rows_have_only_the_newest(tmp_path, num_frames):
    frames = np.random.default_rng(0).integers(0, 256, (60, 2, 9, 7), np.uint8)

    def stacks(t):
        """Of two environments. The second's episodes last 7 rows, and begin with one frame in all places."""
        places = np.arange(t, t + num_frames)
        return np.stack([frames[places, 0], frames[np.maximum(places, t - t % 7 + num_frames - 1), 1]])

    def content(t):
        return {"screen": stacks(t), "channels_last": np.moveaxis(stacks(t), 1, 3), "step": t}

    shapes = {"screen": (num_frames, 9, 7), "step": (), "channels_last": (9, 7, num_frames)}
    fields = {name: (shape, "uint8") for name, shape in shapes.items()}
    address = f"unix:{tmp_path}/envs"
    with in_process_server(lambda: Group(fields, list(fields), content, num_envs=2), address, deflate=True):
        with Learner([address], width=2) as learner:
            for (env_outputs, _), _ in learner.rollouts(6):
                screen, step, channels_last = env_outputs[0]
                for row, t in enumerate(step[:, 0].tolist()):
                    np.testing.assert_array_equal(screen[row], stacks(t))
                    np.testing.assert_array_equal(channels_last[row], np.moveaxis(stacks(t), 1, 3))
        with Stream(address) as stream:  # its first row has whole stacks
            lengths = []
            for _ in range(9):
                lengths.append(len(zlib.decompress(stream.receive().deflated)))
                stream.send(array_message(np.zeros(2, np.int64)))
    others = 1 + sum(np.dtype(dtype).itemsize for dtype in written_by("env").values())
    whole, is_stack = 2 * (2 * num_frames * 63 + others), num_frames in (2, 8)
    left_out = (num_frames - 1) * 63 if is_stack else 0
    shifted = [0, 2, 2, 2, 2, 2, 2, 1, 2]  # stacks of each row
    assert lengths == [whole + 2 * is_stack - number * left_out for number in shifted]


def test_tuples_dicts_and_arrays_without_dimensions_keep_their_structure(tmp_path):
    fields = {"f0": ((2, 1), "float64"), "f1": ((), "int16"), "f2": ((0, 3), "uint8"), "f3": ((3,), "float32")}

    def content(t):
        return {"f0": [[[t], [2]]] * 2, "f1": [t, -t], "f3": t + np.arange(6).reshape(2, 3)}

    structure = ["f3", {"b": ("f1",), "a": "f2"}, (), "f0"]
    group = Group(fields, structure, content, num_envs=2, action=((2,), "float32"))
    address = f"unix:{tmp_path}/envs"

    def agent(env_outputs, agent_state):
        return (np.ones((1, 2, 2), np.float32), {"baseline": np.float32([[1, 2]])}), agent_state

    with in_process_server(lambda: group, address), Learner([address], width=2, agent=agent) as learner:
        for ((observation, *_), (action, others)), state in learner.rollouts(1):
            assert [np.asarray(observation[0]).tolist()[2], observation[1]["b"][0].tolist()[2]] == [
                [[2, 3, 4], [5, 6, 7]],
                [2, -2],
            ]
            assert list(observation[1]) == ["a", "b"] and observation[2] == () and state == ()
            assert observation[1]["a"].shape == (UNROLL_LENGTH + 1, 2, 0, 3)
            assert observation[3].shape == (UNROLL_LENGTH + 1, 2, 2, 1)
            assert action.shape == (UNROLL_LENGTH + 1, 2, 2) and others["baseline"][1:].tolist() == [[1, 2]] * 5


def test_observations_larger_than_grpcs_four_megabytes_arrive_whole(tmp_path):
    large = np.random.default_rng(0).integers(0, 256, 9_000_001, np.uint8)

    def content(t):
        return {"large": large + np.uint8(t)}

    def make_group():
        return Group({"large": (large.shape, "uint8")}, "large", content)

    address = f"unix:{tmp_path}/envs"
    with in_process_server(make_group, address), Learner([address], unroll_length=2) as learner:
        for number, ((env_outputs, _), _) in enumerate(learner.rollouts(2)):
            for row in range(3):
                np.testing.assert_array_equal(env_outputs[0][row, 0], large + np.uint8(2 * number + row))


def test_a_state_of_several_layers_is_repeated_for_each_environment(tmp_path):
    address = f"unix:{tmp_path}/envs"
    state = {"h": np.arange(6, dtype=np.float32).reshape(2, 1, 3), "c": np.zeros((1, 1), np.int64)}
    with in_process_server(lambda: counting_group(4), address), Learner([address], width=4, state=state) as learner:
        for _, initial in learner.rollouts(2):
            np.testing.assert_array_equal(initial["h"], np.repeat(state["h"], 4, axis=1))
            assert initial["c"].shape == (1, 4)


def test_a_learner_may_write_to_its_batch_and_to_its_outputs_later_without_harm(tmp_path):
    """A batch that is one rollout is that rollout's own memory, and the next one begins with a row of it."""
    address = f"unix:{tmp_path}/envs"
    with in_process_server(lambda: counting_group(), address), Learner([address]) as learner:
        first_rows = []
        for (env_outputs, _), _ in learner.rollouts(5):
            first_rows.append(int(env_outputs[0][0, 0]))
            assert constant(env_outputs[7]) == constant(env_outputs[8]) == 0
            for leaf in env_outputs:
                leaf[...] = -1 if leaf.dtype.is_signed else True
        assert first_rows == [0, 5, 10, 15, 20]


def test_each_stream_and_each_life_has_other_seeds_and_a_run_can_be_repeated(tmp_path):
    number = itertools.count()

    def first_seeds(seed, num_streams, max_env_restarts, on_step):
        """Of every stream and, where its environments break in each step, of every life."""
        seeds = queue.SimpleQueue()

        class Seeded(Group):
            def reset(self, seed, row):
                seeds.put(seed)
                super().reset(seed, row)

        def make_group():
            return Seeded({"x": ((), "int8")}, "x", lambda t: {"x": 0}, on_step=on_step)

        address = f"unix:{tmp_path}/{next(number)}"
        with in_process_server(make_group, address, max_streams=num_streams):
            with Learner([address] * num_streams, seed=seed, max_env_restarts=max_env_restarts):
                return [seeds.get(timeout=LIMIT) for _ in range(num_streams + max_env_restarts)]

    def breaks(row):
        raise RuntimeError("this life ends here")

    lives = first_seeds(7, 1, 2, breaks)
    assert len(set(lives)) == 3 and all(0 <= seed < 2**30 for seed in lives)
    assert lives == first_seeds(7, 1, 2, breaks) and not set(lives) & set(first_seeds(8, 1, 2, breaks))
    streams = first_seeds(7, 3, 0, lambda row: None)
    assert len(set(streams)) == 3 and lives[0] in streams


# ------------------------------------------------------------------------------------------- what may go wrong


def constant(leaf):
    """The one value of all items of a leaf."""
    (value,) = np.unique(np.asarray(leaf)).tolist()
    return value


def first_rows_and_lives(rollouts):
    """(count in row 0, life) of each rollout of `counting_group`; asserts that a rollout has rows of one life only."""
    found = []
    for (env_outputs, _), _ in rollouts:
        counts = np.asarray(env_outputs[0])[:, 0]
        np.testing.assert_array_equal(counts, counts[0] + np.arange(UNROLL_LENGTH + 1))
        found.append((int(counts[0]), constant(env_outputs[8])))
    return found


def environments(rollouts):
    """(number, group, life) of the counting environments that these rollouts are of; asserts that none mixes any."""
    return {
        (constant(env_outputs[0]["obs"][..., 0]), constant(env_outputs[7]), constant(env_outputs[8]))
        for (env_outputs, _), _ in rollouts
    }


def address_in(address, text):
    return f"environment server {address}: " in text


def test_an_environment_that_raises_is_made_anew_and_no_rollout_is_of_two_lives(tmp_path):
    address = f"unix:{tmp_path}/envs"

    def crash(row):
        if row == 12:
            raise RuntimeError("this toy breaks here")

    with in_process_server(lambda: counting_group(on_step=crash), address):
        with Learner([address], max_env_restarts=3) as learner:
            assert first_rows_and_lives(learner.rollouts(6)) == [(0, 0), (5, 0), (0, 1), (5, 1), (0, 2), (5, 2)]
            counters = learner.pool.counters()
            error = learner.wait()
    # The third life may have ended, too.
    assert counters["restarts"] in (2, 3) and counters["dropped_rollouts"] in (2, 3)
    assert len(learner.log) == 3 and all('raise RuntimeError("this toy breaks here")' in line for line in learner.log)
    assert isinstance(error, ConnectionError) and "max_env_restarts 3" in str(error)
    assert "this toy breaks here" in str(error) and address in str(error)


def test_an_environment_that_cannot_be_reset_ends_the_run_with_its_own_traceback(tmp_path):
    with ServerProcess(tmp_path, "toy_envs:CrashInReset-v0") as server:
        with Learner([server.address], max_env_restarts=1) as learner:
            error = learner.wait()
    assert isinstance(error, ConnectionError) and 'raise RuntimeError("this toy cannot be reset")' in str(error)
    assert "this toy cannot be reset" in learner.log[0] and "1 of max_env_restarts 1" in learner.log[0]


def test_a_killed_server_that_is_started_again_goes_on_and_the_others_never_stopped(tmp_path):
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    with contextlib.ExitStack() as stack:
        one, other = (
            stack.enter_context(ServerProcess(d, "toy_envs:Counting-v0", "--group_width", "1")) for d in directories
        )
        learner = stack.enter_context(Learner([one.address, other.address], connect_timeout=2.0, max_env_restarts=100))
        streams = set()
        while len(streams) < 2:
            streams |= environments(learner.rollouts(1))
        assert {(group, life) for _, group, life in streams} == {(0, 0), (1, 0)}
        one.process.kill()
        one.process.wait()
        while len(learner.log) < 2:  # the stream is lost, and connecting it again has failed once
            list(learner.rollouts(1))
        assert environments(learner.rollouts(20)) <= streams
        assert len(environments(learner.rollouts(5))) == 1
        stack.enter_context(ServerProcess(directories[0], "toy_envs:Counting-v0", "--group_width", "1"))
        while not (new := environments(learner.rollouts(1)) - streams):
            pass
        ((number, group, life),) = new
        assert (group, life) == (0, 1), "attempts that failed begin no life"
        assert number not in {number for number, *_ in streams}, "episodes of another seed"
        assert learner.pool.counters()["restarts"] >= 2 and address_in(one.address, learner.log[0])
        assert not learner.errors


def test_a_server_that_is_gone_for_good_ends_the_run_and_is_named(tmp_path):
    with ServerProcess(tmp_path, "toy_envs:Counting-v0", "--group_width", "1") as server:
        with Learner([server.address], connect_timeout=2.0, max_env_restarts=1) as learner:
            list(learner.rollouts(2))
            server.process.kill()
            error = learner.wait()
    assert isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
    assert address_in(server.address, str(error)) and "not reached within 2 s" in str(error)


def test_a_hung_server_counts_as_lost_after_the_timeout_and_one_that_wakes_up_is_used_again(tmp_path):
    with ServerProcess(tmp_path, "toy_envs:Counting-v0", "--group_width", "1", "--max_streams", "1") as server:
        with Learner([server.address], env_timeout=2.0) as learner:
            ((first, *_),) = environments(learner.rollouts(3))
            server.process.send_signal(signal.SIGSTOP)
            # A stream that waits for room in the queue does not wait for its environment.
            wait_until(lambda: learner.log or (learner.queue.size() and list(learner.rollouts(1)) and None))
            server.process.send_signal(signal.SIGCONT)
            assert "no answer within 2 s" in learner.log[0] and address_in(server.address, learner.log[0])
            list(learner.rollouts(5))  # some may have waited from before
            ((number, group, life),) = environments(learner.rollouts(3))
            assert number != first and (group, life) == (0, 1), "episodes of another seed, in the next life"


def test_a_learner_that_takes_its_time_keeps_its_streams(tmp_path, monkeypatch):
    make_server = grpc.server

    def make_impatient_server(executor, *, options, **others):
        options = [option for option in options if "keepalive" not in option[0]]
        options += [("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_timeout_ms", 2000)]
        options += [("grpc.http2.ping_timeout_ms", 2000)]  # what newer versions of gRPC look at
        return make_server(executor, options=options, **others)

    calls = []

    def agent(env_outputs, agent_state):
        calls.append(None)
        if len(calls) == 50:
            time.sleep(6)  # the others wait, too: only this thread answers
        return act_with_zeros(env_outputs, agent_state)

    monkeypatch.setattr(grpc, "server", make_impatient_server)
    with in_process_server(counting_group, f"unix:{tmp_path}/socket", max_streams=8) as server:
        with Learner([server.address] * 8, agent=agent) as learner:
            while len(calls) < 100:
                next(learner.rollouts(1))
            assert not learner.log and learner.pool.counters()["restarts"] == 0


def test_a_server_that_nobody_started_is_waited_for_and_then_named_with_the_cause(tmp_path):
    began = time.monotonic()
    with Learner([f"unix:{tmp_path}/nobody"], connect_timeout=1.0) as learner:
        error = learner.wait()
    assert time.monotonic() - began > 0.9
    assert isinstance(error, ConnectionError) and "not reached within 1 s" in str(error)
    assert "No such file or directory" in str(error) and not learner.log, "the pool did not try in vain five times more"


def test_a_server_that_starts_after_the_learner_is_used(tmp_path):
    with Learner([f"unix:{tmp_path}/envs"], connect_timeout=LIMIT) as learner:
        with ServerProcess(tmp_path, "toy_envs:Counting-v0", "--group_width", "1"):
            assert len(list(learner.rollouts(3))) == 3


def test_a_bad_server_rests_while_enough_others_work(tmp_path):
    good, bad = f"unix:{tmp_path}/good", f"unix:{tmp_path}/bad"

    def crash(row):
        raise RuntimeError("this toy breaks in each life")

    with (
        in_process_server(lambda: counting_group(), good),
        in_process_server(lambda: counting_group(on_step=crash), bad),
    ):
        with Learner([good, bad], max_env_restarts=1, min_streams=1) as learner:
            while not (rests := [line for line in learner.log if "This stream rests for 30 s" in line]):
                list(learner.rollouts(1))
            assert address_in(bad, rests[0]) and "1 of 2 are left" in rests[0]
            assert {int(outputs[7].flatten()[0]) for (outputs, _), _ in learner.rollouts(20)} == {0}
            assert not learner.errors
        with Learner([good, bad], max_env_restarts=1, min_streams=2) as learner:
            assert "this toy breaks in each life" in str(learner.wait())


def test_a_server_that_refuses_its_learner_in_mid_run_rests_while_enough_others_work(tmp_path):
    good, bad = f"unix:{tmp_path}/good", f"unix:{tmp_path}/bad"

    def crash(row):
        if row == 7:
            lost._token = b"changed"
            raise RuntimeError("this toy breaks")

    with in_process_server(lambda: counting_group(), good):
        with in_process_server(lambda: counting_group(on_step=crash), bad) as lost:
            with Learner([good, bad], min_streams=1) as learner:
                while not (rests := [line for line in learner.log if "This stream rests" in line]):
                    list(learner.rollouts(1))
                assert "UNAUTHENTICATED" in rests[0] and not learner.errors


def test_a_failed_inference_is_what_run_raises_while_other_streams_wait(tmp_path):
    address, calls = f"unix:{tmp_path}/envs", itertools.count()

    def agent(env_outputs, agent_state):
        if next(calls) == 7:
            raise ZeroDivisionError("this agent breaks here")
        return act_with_zeros(env_outputs, agent_state)

    with in_process_server(lambda: counting_group(), address):
        with Learner([address] * 2, agent=agent) as learner:
            error = learner.wait()
    assert isinstance(error, libbeast.AsyncError) and "dropped unanswered" in str(error)
    assert [str(error) for error in learner.agent_errors] == ["this agent breaks here"]


@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda k, n: np.zeros((1, k), np.int64), r"a tuple \(agent_outputs, agent_state\)"),
        (lambda k, n: ((np.zeros((1, k), np.int64),), (np.zeros((1, k), np.float32),)), "agent state of 1 arrays"),
        (lambda k, n: ((np.zeros((2, k), np.int64),), ()), r"shape \[2, 3\], expected \[1, 3"),
        (lambda k, n: ((np.zeros((1, k), np.int32),), ()), r"int32 \[1, 3\], expected int64 \[1, 3\]"),
        (lambda k, n: ((np.zeros((1, k, 1), np.int64),), ()), r"int64 \[1, 3, 1\], expected int64 \[1, 3\]"),
        (lambda k, n: ((np.zeros((1, k), np.int64), np.zeros((1, k, 1 + n // 2))), ()), r"float64 \[1, 3, 2\], in the"),
        (
            lambda k, n: ((np.zeros((1, k), np.int64),) * (1 + n // 2), ()),
            "answered 2 agent outputs, its first answer had 1",
        ),
    ],
    ids=lambda parameter: parameter if isinstance(parameter, str) else "answer",
)
def test_an_answer_of_a_wrong_form_ends_the_run_and_says_what_was_expected(tmp_path, answer, message):
    address, calls = f"unix:{tmp_path}/envs", itertools.count()

    def make_group():
        return Group({"x": ((), "int8")}, "x", lambda t: {"x": 0}, num_envs=3, action=((), "int64"))

    def agent(env_outputs, agent_state):
        return answer(3, next(calls))

    with in_process_server(make_group, address), Learner([address], width=3, agent=agent) as learner:
        error = learner.wait()
    with pytest.raises(ValueError, match=message):
        raise error


def test_run_ends_when_the_learner_closes_its_queues_whatever_the_streams_wait_for(tmp_path):
    hang = threading.Event()
    address, other = f"unix:{tmp_path}/envs", f"unix:{tmp_path}/other"
    hanging = in_process_server(lambda: counting_group(on_step=lambda row: hang.wait(LIMIT)), other)
    with in_process_server(lambda: counting_group(), address, max_streams=4), hanging:
        try:
            # Nobody takes rollouts: one stream waits for room in the queue, the other for its environment.
            with Learner([address, address, other]) as learner:
                # Of the first two streams: no more come until there is room.
                wait_until(lambda: learner.pool.count() >= 3 * UNROLL_LENGTH)
                began = time.monotonic()
                learner.close()
                assert learner.wait() is None
                assert time.monotonic() - began < LIMIT / 2, "it waited for the environment"
                assert learner.log == []
            # Nobody infers.
            learner = Learner([address])
            with learner:
                learner.batcher.close()
                assert learner.wait() is None
        finally:
            hang.set()


def test_stop_ends_run_from_another_thread_and_a_second_run_is_refused(tmp_path):
    address = f"unix:{tmp_path}/envs"
    with in_process_server(lambda: counting_group(), address), Learner([address]) as learner:
        list(learner.rollouts(2))
        learner.pool.stop()
        assert learner.wait() is None
        with pytest.raises(RuntimeError, match="a pool runs once"):
            learner.pool.run()


def test_many_streams_take_a_few_threads_and_none_is_left_when_run_returns(tmp_path):
    address = f"unix:{tmp_path}/envs"

    def threads():
        return set(os.listdir("/proc/self/task"))

    def settled():  # gRPC and the server, which is in this process, too, end theirs in their own time
        found, since = threads(), time.monotonic()
        while time.monotonic() - since < 0.5:
            time.sleep(0.02)
            if threads() != found:
                found, since = threads(), time.monotonic()
        return found

    def session(num_streams):
        with Learner([address] * num_streams) as learner:
            list(learner.rollouts(2 * num_streams))
            during = threads()
        return during

    with in_process_server(lambda: counting_group(), address, max_streams=24):
        session(24)  # gRPC's and the server's own threads are started by it, and stay
        before = settled()
        assert 6 <= len(session(24) - before) < 24  # the pool's and the learner's: streams have none of their own
        wait_until(lambda: len(threads()) <= len(before) + 2, lambda: f"{len(before)} threads, then {len(threads())}")


def test_a_server_that_comes_back_with_other_environments_is_refused(tmp_path):
    address, width = f"unix:{tmp_path}/envs", itertools.count(2)

    def crash(row):
        if row == 7:
            raise RuntimeError("this toy breaks here")

    def group_of_its_own():
        server._hello = None  # as if another server had come up at this address
        return counting_group(next(width) // 2, on_step=crash)

    with in_process_server(group_of_its_own, address) as server:
        with Learner([address]) as learner:
            list(learner.rollouts(1))
            error = learner.wait()
    assert isinstance(error, ConnectionRefusedError) and "has 2 environments instead of 1" in str(error)


# ------------------------------------------------------------------------------------------- fields of a row


def test_env_outputs_have_the_fields_that_the_learner_names_and_what_else_a_server_sends_is_left_out(tmp_path):
    address, zeros = f"unix:{tmp_path}/envs", np.zeros((1, 1), np.int64)
    said = hello([("x", "float32", ()), ("goal", "uint8", (2,)), ("more", "int8", ())])
    # x, goal, more, reward, done, terminated, truncated, episode_return, episode_step, task
    row = np.float32(7).tobytes() + b"\x08\x09" + b"\x05" + bytes(4) + b"\x01" + bytes(6) + np.int32([3, 0]).tobytes()
    messages = said, *[wire.FromServer(row=row).SerializeToString()] * 2
    with server_that_says(address, *messages):
        agent = lambda env_outputs, state: ((zeros,), state)  # noqa: E731
        with Learner([address], agent=agent, unroll_length=1, row_fields=["episode_step", "goal"]) as learner:
            ((((x, episode_step, goal, group, life, env_number), _), _),) = learner.rollouts(1)
    assert x.tolist() == [[7.0]] * 2 and episode_step.tolist() == [[3]] * 2
    assert goal.tolist() == [[[8, 9]]] * 2 and group.tolist() == life.tolist() == env_number.tolist() == [[0]] * 2


def test_a_server_without_a_field_that_the_learner_names_is_refused_with_the_fields_name(tmp_path):
    address = f"unix:{tmp_path}/envs"
    with in_process_server(counting_group, address), Learner([address], row_fields=["reward", "ghost"]) as learner:
        error = learner.wait()
    assert isinstance(error, ConnectionRefusedError) and address_in(address, str(error))
    assert 'a row has no field "ghost", which is one of the learner\'s row_fields' in str(error)


def test_row_fields_that_belong_to_the_observation_are_refused(tmp_path):
    address = f"unix:{tmp_path}/envs"
    with in_process_server(counting_group, address), Learner([address], row_fields=["reward", "count"]) as learner:
        with pytest.raises(AssertionError, match="has ended"):
            list(learner.rollouts(1))
        (error,) = learner.errors
    assert isinstance(error, ConnectionRefusedError) and address_in(address, str(error))
    assert 'the learner\'s row_fields have "count", which belongs to the observation' in str(error)


def test_the_hello_of_atari_says_four_frames_a_step_and_all_others_one(tmp_path):
    with ServerProcess(tmp_path, "PongNoFrameskip-v4") as server:
        spec = libbeast.handshake(server.address, timeout=60)
        assert spec["frames_per_step"] == 4
        with Learner([server.address], expected={**spec, "frames_per_step": 1}) as learner:
            error = learner.wait()
            assert isinstance(error, ConnectionRefusedError) and "has 4 frames a step instead of 1" in str(error)
        del spec["frames_per_step"]  # unknown to who expects it
        with Learner([server.address], expected=spec) as learner:
            assert len(list(learner.rollouts(1))) == 1
    address = f"unix:{tmp_path}/envs"
    with server_that_says(address, hello()):  # of who does not know
        assert libbeast.handshake(address, timeout=60)["frames_per_step"] == 1


# ------------------------------------------------------------------------------------------- who may connect


def test_wrong_token_environment_and_address_are_refused_at_once_with_both_sides_values(tmp_path):
    address = f"unix:{tmp_path}/envs"
    with in_process_server(lambda: counting_group(), address, env_id="Counting-v0", token="secret"):
        for options, message in [
            ({"token": "guess"}, "UNAUTHENTICATED: the learner sent a wrong token"),
            ({}, "no token"),
            ({"token": "secret", "env": "Pong-v0"}, "expects environment 'Pong-v0', the env server has 'Counting-v0'"),
        ]:
            with pytest.raises(ConnectionRefusedError, match=message):
                libbeast.handshake(address, **options)
            with Learner([address], **options) as learner:
                assert message in str(learner.wait()) and not learner.log
        assert libbeast.handshake(address, token="secret", env="Counting-v0")["num_envs"] == 1


def test_tls_protects_a_port_and_a_client_without_it_or_with_another_certificate_does_not_get_in(tmp_path):
    for name in ("server", "stranger"):
        (tmp_path / name).mkdir()
    certificate, key = make_certificate(tmp_path / "server", "DNS:localhost,IP:127.0.0.1")
    stranger, _ = make_certificate(tmp_path / "stranger", "DNS:localhost,IP:127.0.0.1")
    tls = key.read_bytes(), certificate.read_bytes()
    with in_process_server(lambda: counting_group(2), "localhost:0", tls=tls, token="secret") as server:
        root = certificate.read_bytes()
        options = {"token": "secret", "timeout": 2.0}
        assert libbeast.handshake(server.address, root_certificates=root, token="secret", timeout=60)["num_envs"] == 2
        with Learner([server.address], width=2, root_certificates=root, token="secret") as learner:
            assert first_rows_and_lives(learner.rollouts(3)) == [(0, 0), (5, 0), (10, 0)]
        began = time.monotonic()
        with pytest.raises(ConnectionRefusedError, match="(?i)certificate.verify.failed.*root_certificates are for"):
            libbeast.handshake(server.address, root_certificates=stranger.read_bytes(), token="secret", timeout=LIMIT)
        assert time.monotonic() - began < LIMIT / 2, "it is not tried again"
        with pytest.raises(ConnectionError, match="not reached within 2 s: UNAVAILABLE.*a server with --tls_cert"):
            libbeast.handshake(server.address, **options)


@pytest.mark.parametrize("fault", ["expired", "of another host"])
def test_a_servers_certificate_of_no_use_is_told_at_once_with_the_remedy(tmp_path, fault):
    names = "IP:10.0.0.1" if fault == "of another host" else "IP:127.0.0.1"
    certificate, key = (path.read_bytes() for path in make_certificate(tmp_path, names, expired=fault == "expired"))
    with in_process_server(lambda: counting_group(2), "127.0.0.1:0", tls=(key, certificate)) as server:
        began = time.monotonic()
        with pytest.raises(ConnectionRefusedError, match="(?i)certificate.*root_certificates are for") as refused:
            libbeast.handshake(server.address, root_certificates=certificate, timeout=LIMIT)
        assert time.monotonic() - began < LIMIT / 2, "it is not tried again"
        assert "\n" not in str(refused.value)
        with Learner([server.address], width=2, root_certificates=certificate) as learner:
            assert "root_certificates are for" in str(learner.wait()) and not learner.log


def test_a_token_does_not_cross_a_network_in_plain_text():
    arguments = (5, libbeast.BatchingQueue(), libbeast.DynamicBatcher())
    for address in ("192.0.2.1:4431", "envs.example.com:4431", "127.example.com:4431", "ipv4:192.0.2.1:4431"):
        with pytest.raises(ValueError, match="plain text: give root_certificates"):
            libbeast.ActorPool(*arguments, [address], (), token="secret")
        libbeast.ActorPool(*arguments, [address], (), token="secret", root_certificates=b"certificates")
        libbeast.ActorPool(*arguments, [address], (), token="secret", insecure=True)
    for address in ("127.0.0.1:4431", "localhost:4431", "[::1]:4431", "unix:/somewhere", "ipv4:127.0.0.1:4431"):
        libbeast.ActorPool(*arguments, [address], (), token="secret")


def test_a_token_that_cannot_be_sent_is_refused_and_does_not_end_the_process():
    script = """
import sys, libbeast
for token in ("secret\\n", "sécret", "two words", "\\0"):
    for function in (
        lambda: libbeast.handshake("127.0.0.1:1", token=token, timeout=0.1),
        lambda: libbeast.ActorPool(
            5, libbeast.BatchingQueue(), libbeast.DynamicBatcher(), ["127.0.0.1:1"], (), token=token
        ),
    ):
        try:
            function()
        except ValueError as error:
            assert "must be ASCII without spaces" in str(error) and "ecret" not in str(error), error
        else:
            sys.exit("no error")
print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0 and "refused" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"unroll_length": 0}, "unroll_length is 0, must be 1 to 1000000 steps"),
        ({"unroll_length": 1_000_001}, "unroll_length is 1000001, must be 1 to 1000000 steps"),
        ({"unroll_length": 2**63 - 1}, "unroll_length is 9223372036854775807, must be"),
        ({"env_server_addresses": []}, "env_server_addresses is empty"),
        ({"env_server_addresses": ["localhost"]}, '"localhost" is not an address'),
        ({"env_server_addresses": ["localhost:http"]}, "expected unix:/path or host:port"),
        ({"initial_agent_state": (np.zeros((1, 2)),)}, r"shape \[1, 2\], expected \[L, 1, ...\]"),
        ({"initial_agent_state": np.float32(1)}, r"shape \[\], expected"),
        ({"env_timeout": 0.0}, "env_timeout is 0"),
        ({"connect_timeout": float("nan")}, "connect_timeout is nan"),
        ({"max_env_restarts": -1}, "max_env_restarts is -1"),
        ({"row_fields": ["reward", "done", "reward"]}, 'row_fields has "reward" twice'),
    ],
)
def test_impossible_arguments_are_refused_by_name(changes, message):
    arguments = {
        "unroll_length": 5,
        "learner_queue": libbeast.BatchingQueue(),
        "inference_batcher": libbeast.DynamicBatcher(),
        "env_server_addresses": ["unix:/nowhere"],
        "initial_agent_state": (),
    }
    with pytest.raises(ValueError, match=message):
        libbeast.ActorPool(**{**arguments, **changes})


def test_a_rollout_larger_than_the_machines_memory_is_refused_before_it_is_allocated(tmp_path):
    address = f"unix:{tmp_path}/envs"
    large = hello([("x", "uint8", (2**30,))])
    with server_that_says(address, large), Learner([address], unroll_length=10**6) as learner:
        with pytest.raises(
            ValueError, match="unroll_length 1000000 and 1 environments needs 10737[0-9]+ GB, this machine"
        ):
            raise learner.wait()


# ------------------------------------------------------------------------------------------- servers that lie


@contextlib.contextmanager
def server_that_says(address, *messages, status=None, compression=None):
    """A server that sends these bytes to whoever connects and then waits, or ends the stream with `status`. Who asks
    for the hello only gets the first message."""

    def stream(requests, context):
        said = wire.LearnerHello.FromString(dict(context.invocation_metadata())[wire.HELLO_HEADER])
        if said.only_hello and messages:
            yield messages[0]
            return
        yield from messages
        if status:
            context.abort(*status)
        for _ in requests:
            pass

    server = grpc.server(futures.ThreadPoolExecutor(8), compression=compression)
    _, service, method = wire.STREAM.split("/")
    handler = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(address)
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


def test_a_compressed_message_is_refused_before_it_grows(tmp_path):
    address = f"unix:{tmp_path}/envs"
    with server_that_says(address, hello() + ZEROS):
        assert libbeast.handshake(address)["num_envs"] == 1
    with server_that_says(address, hello() + ZEROS, compression=grpc.Compression.Gzip):
        with pytest.raises(ConnectionError, match="not one of rpcenv.proto"):
            libbeast.handshake(address)


def nested(depth):
    structure = wire.Structure(field=0)
    for _ in range(depth):
        structure = wire.Structure(tuple=wire.Structure.Tuple(parts=[structure]))
    return structure


def the_error(parameter):
    """The name of a case: its error, not its bytes."""
    return parameter if isinstance(parameter, str) else "bytes"


TWICE = wire.Structure(tuple=wire.Structure.Tuple(parts=[wire.Structure(field=0)] * 2))
X = ("x", "float32", ())


@pytest.mark.parametrize(
    "message, error",
    [
        (hello(protocol=1), f"the server speaks protocol 1, the learner protocol {wire.PROTOCOL}"),
        (hello(env="\x1b]0;title\x07"), r'the environment\'s id "\?]0;title\?" has characters that cannot be shown'),
        (hello(env="x" * 201), "more than 200 bytes"),
        (hello([("a\tb", "float32", ())]), "the field .* has characters that cannot be shown"),
        (hello(num_envs=0), "the stream has 0 environments, must be 1 to 65536"),
        (hello(num_envs=65537), "the stream has 65537 environments"),
        (hello([("x", "complex64", ())]), "complex64.*float32"),
        (hello([("x", "", ())]), 'field "x"'),
        (hello([("x", "float32", (-1,))]), r'field "x" has shape \[-1\]: sizes must be 0 or more'),
        (hello([("x", "float32", (2**62, 4))]), "exceeds the largest row"),
        (hello([("x", "float32", (0, 2**62, 2**62))]), "exceeds the largest row"),
        (hello([("x", "float32", (1,) * 31)]), "31 dimensions, at most 30"),
        (hello([("x", "uint8", (2**30,)), ("y", "uint8", (2**30,))]), "a row has 21474.* bytes, at most"),
        (hello([X, X]), 'two fields are called "x"'),
        (hello([X, ("reward", "float32", ())]), 'two fields are called "reward"'),
        (hello(fields=[X], observation=wire.Structure(field=8)), "field number 8, but there are only 8"),
        (hello(observation=wire.Structure(field=1)), "field number 1, which is used already or belongs to every row"),
        (hello(observation=TWICE), "field number 0, which is used already"),
        (hello(observation=wire.Structure()), "neither a field nor a tuple nor a dict"),
        (hello(observation=nested(32)), "nested deeper than 32 levels"),
        (hello(action=wire.Field(dtype="str")), "str"),
        (
            wire.FromServer(hello=wire.ServerHello(protocol=wire.PROTOCOL, num_envs=1)).SerializeToString(),
            'no field "reward"',
        ),
        (
            wire.FromServer(
                hello=wire.ServerHello(
                    protocol=wire.PROTOCOL, num_envs=1, fields=[wire.Field(name="reward", dtype="float64")]
                )
            ).SerializeToString(),
            r'"reward" is float64 of shape \[\], expected float32',
        ),
        (wire.FromServer(row=b"123").SerializeToString(), "first message is not its hello"),
        (b"", "first message is not its hello"),
    ],
    ids=the_error,
)
def test_a_hello_that_memory_cannot_be_laid_out_by_is_refused_and_not_tried_again(tmp_path, message, error):
    address = f"unix:{tmp_path}/envs"
    with server_that_says(address, message):
        with pytest.raises(ConnectionRefusedError, match=error) as raised:
            libbeast.handshake(address, timeout=60)
        assert address_in(address, str(raised.value))


@pytest.mark.parametrize("change", ["left out", "of another type", "of another shape"])
@pytest.mark.parametrize("name", [name for name in written_by("env") if name != "task"])  # which libbeast does not read
def test_a_hello_needs_every_field_that_environments_write_as_the_table_of_fields_has_it(tmp_path, name, change):
    message = wire.FromServer.FromString(hello())
    fields = message.hello.fields
    (field,) = (field for field in fields if field.name == name)
    if change == "left out":
        fields.remove(field)
        error = f'a row has no field "{name}"'
    elif change == "of another type":
        field.dtype = "int64"
        error = f'field "{name}" is int64 of shape []'
    else:
        field.shape.append(1)
        error = f'field "{name}" is {field.dtype} of shape [1]'
    address = f"unix:{tmp_path}/envs"
    with server_that_says(address, message.SerializeToString()):
        with pytest.raises(ConnectionRefusedError, match=re.escape(error)):
            libbeast.handshake(address, timeout=60)


ROW_BYTES = 4 + 4 + 3 + 4 + 4 + 4


@pytest.mark.parametrize(
    "message, error",
    [
        (
            wire.FromServer(row=bytes(ROW_BYTES - 1)).SerializeToString(),
            "received a row of 22 bytes, but the hello announced 23",
        ),
        (wire.FromServer(row=bytes(ROW_BYTES + 1)).SerializeToString(), "a row of 24 bytes"),
        (wire.FromServer(row=bytes(50_000)).SerializeToString(), "a row of 50000 bytes"),
        (
            wire.FromServer(row=bytes(5_000_000)).SerializeToString(),
            "RESOURCE_EXHAUSTED: .*(larger than max|Buffers full).* may have [0-9]+ bytes",
        ),
        (wire.FromServer(row=bytes(ROW_BYTES)).SerializeToString()[:-1], "cut off"),
        (wire.FromServer(row=bytes(ROW_BYTES)).SerializeToString() * 2, "two rows in one message"),
        (b"", "an empty message instead of a row"),
        (b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a row of 4294967295 bytes|not one of rpcenv.proto"),
        (b"\xff\xff\xff\xff", "not one of rpcenv.proto"),
        (hello(), "a second hello"),
        (b"\x1a\x04\xff\xfea\x01", r"environment server .*: \?\?a\?"),
    ],
    ids=the_error,
)
def test_a_row_that_is_not_what_the_hello_announced_is_refused(tmp_path, message, error):
    address = f"unix:{tmp_path}/envs"
    with server_that_says(address, hello(), message), Learner([address], max_env_restarts=0) as learner:
        raised = learner.wait()
        assert learner.pool.count() == 0
    with pytest.raises(ConnectionError, match=error):
        raise raised


@pytest.mark.parametrize(
    "message, error",
    [
        (row_of(0, math.nan), 'a row whose field "reward" is not finite'),
        (row_of(math.inf, 0), 'a row whose field "x" is not finite'),
        (row_of(-math.inf, 0), 'a row whose field "x" is not finite'),
        (row_of(0, 0, truncated=2), 'a row whose field "truncated" has bools other than 0 and 1'),
        (row_of(0, 0, done=False), "a first row that is not done everywhere"),
    ],
)
def test_a_row_that_would_spoil_the_learner_ends_its_stream_and_names_its_server(tmp_path, message, error):
    address = f"unix:{tmp_path}/envs"
    with server_that_says(address, hello(), message), Learner([address], max_env_restarts=0) as learner:
        raised = learner.wait()
    with pytest.raises(ConnectionError, match=error):
        raise raised
    assert address_in(address, str(raised)) and learner.pool.count() == 0


def test_numbers_that_are_large_are_finite(tmp_path):
    address, large = f"unix:{tmp_path}/envs", np.finfo(np.float32).max
    rows = [row_of(large, -large), *[row_of(-large, large, done=False)] * 2]
    with server_that_says(address, hello(), *rows), Learner([address], unroll_length=2) as learner:
        assert len(list(learner.rollouts(1))) == 1


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_envs", 2),
        ("env", "truths"),
        ("action", ("int64", ())),
        ("action_space", "{}"),
        ("observation_space", "{}"),
        ("observation", ("x",)),
        ("fields", {"x": ("float64", ())}),
        ("frames_per_step", 4),
    ],
)
def test_a_stream_must_have_what_its_learner_expects(tmp_path, name, value):
    address = f"unix:{tmp_path}/envs"
    with server_that_says(address, hello(), row_of(0, 0)):
        expected = dict(libbeast.handshake(address, timeout=60))
        expected[name] = {**expected["fields"], **value} if name == "fields" else value
        with Learner([address], expected=expected) as learner:
            with pytest.raises(ConnectionRefusedError, match=r"has .* instead of|nested in another way"):
                raise learner.wait()


def test_a_hello_is_no_longer_than_a_megabyte(tmp_path):
    address = f"unix:{tmp_path}/envs"
    with server_that_says(address, hello(observation_space="x" * 2_000_000)):
        with pytest.raises(ConnectionError, match="larger than max"):
            libbeast.handshake(address, timeout=60)


def test_what_a_server_says_cannot_write_to_the_terminal_nor_fill_the_log(tmp_path):
    address = f"unix:{tmp_path}/envs"
    with server_that_says(address, hello([("\x1b]0;\x9b2J" + "x" * 100_000, "complex64", ())])):
        with pytest.raises(ConnectionRefusedError) as raised:
            libbeast.handshake(address, timeout=60)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 3000


def test_fields_that_this_version_does_not_know_are_skipped(tmp_path):
    address, unknown = f"unix:{tmp_path}/envs", b"\xc2\x3e\x03abc" + b"\xc8\x3e\x07"
    row = unknown + row_of(0, 0) + unknown
    with server_that_says(address, unknown + hello() + unknown, row, row, row):
        with Learner([address], unroll_length=2) as learner:
            assert len(list(learner.rollouts(1))) == 1


def test_the_reason_of_a_server_that_ends_the_stream_reaches_the_learner(tmp_path):
    address, reason = f"unix:{tmp_path}/envs", (grpc.StatusCode.INTERNAL, "the simulator's licence has run out")
    with server_that_says(address, hello(), status=reason), Learner([address], max_env_restarts=0) as learner:
        with pytest.raises(ConnectionError, match="INTERNAL: the simulator's licence has run out"):
            raise learner.wait()


# ------------------------------------------------------------------------------------------- leaving the interpreter


@ends.in_every_way_of_ending
def test_the_interpreter_exits_cleanly_with_a_pool_in_any_state(tmp_path, how, code):
    address = f"unix:{tmp_path}/envs"
    with in_process_server(lambda: counting_group(), address):
        ends.check_end(ends.start(ends.ENDS, "dials", address, how), how, code)


def test_ctrl_c_ends_a_handshake_with_a_server_that_does_not_answer(tmp_path):
    program = "import sys, libbeast; print('trying', flush=True); libbeast.handshake(sys.argv[1], timeout=60)"
    with server_that_says(f"unix:{tmp_path}/envs"):
        process = subprocess.Popen(
            [sys.executable, "-c", program, f"unix:{tmp_path}/envs"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "trying\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == -signal.SIGINT and errors.strip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("how", ["exit", "dropped", "stop"])
def test_a_forked_child_ends_and_its_parents_streams_go_on(tmp_path, how):
    address = f"unix:{tmp_path}/envs"
    with in_process_server(lambda: counting_group(), address):
        ends.check_fork(ends.start(ends.FORKS, "dials", address, how))


INTERRUPTED = """
import sys, threading, time, numpy as np
sys.modules["torch"] = None
import libbeast

told = []

def log(message):  # quick, so that the signal comes while the pool waits
    told.append(message)
    if len(told) == 20:
        print("lost", flush=True)

queue, batcher = libbeast.BatchingQueue(), libbeast.DynamicBatcher()
pool = libbeast.ActorPool(1, queue, batcher, [sys.argv[1]] * 8, (), max_env_restarts=10**6, log=log)

def infer():
    for batch in batcher:
        (_, reward, *_), state = batch.get_inputs()
        batch.set_outputs(((np.zeros(tuple(reward.shape), np.int64),), state))

threading.Thread(target=infer, daemon=True).start()
threading.Thread(target=lambda: list(queue), daemon=True).start()
pool.run()
"""


def test_ctrl_c_is_a_keyboard_interrupt_while_log_messages_wait(tmp_path):
    address = f"unix:{tmp_path}/envs"

    def crash(row):
        raise RuntimeError("this toy breaks at once")

    with in_process_server(lambda: counting_group(on_step=crash), address, max_streams=8):
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, address],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout.readline() == "lost\n"
        time.sleep(0.3)  # now and then a stream is lost again
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == -signal.SIGINT and errors.strip().endswith("KeyboardInterrupt"), errors
