"""The env server, as a process that real streams are opened to; its messages and its JSON of spaces."""

import collections
import contextlib
import dataclasses
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import toy_envs
from env_hosts import ROOT, WITHOUT_READER, ServerProcess, Stream, array_message, arrays_of, headers, make_certificate
from google.protobuf import descriptor_pb2
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from waiting import PATIENCE, wait_until

import polybeast_env
from beast import envs
from beast.envs.groups import EnvGroup
from beast.envs.rows import nest_observations
from beast.envs.spaces import category_sizes
from beast.errors import InputError
from beast.hosts import env_server, security, served_group, throttle, wire
from beast.run.command_line import read_source
from beast.run.flags import EnvFlags

# ---------------------------------------------------------------------------------------------- messages


def step_until_it_hangs(server: ServerProcess, stream: Stream) -> None:
    """The step of an environment of server_toys.py that says so and never returns."""
    stream.row()
    stream.act(np.zeros(1, np.int64))
    stream.send(array_message(np.zeros(1, np.int64)))
    wait_until(lambda: "hanging" in server.errors())


def test_messages_are_those_of_the_proto_file(tmp_path):
    try:
        subprocess.run(
            ["protoc", f"--proto_path={ROOT / 'csrc'}", f"--descriptor_set_out={tmp_path / 'set'}", "rpcenv.proto"],
            check=True,
        )
    except FileNotFoundError:
        pytest.skip("protoc is not installed (Debian: protobuf-compiler)")
    described = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file[0]

    def clear_json_names(message):  # protoc adds them, and nothing reads them
        for field in message.field:
            field.ClearField("json_name")
        for nested in message.nested_type:
            clear_json_names(nested)

    for message in described.message_type:
        clear_json_names(message)
    assert wire.file_descriptor() == described


def test_a_row_is_serialized_as_protobuf_would():
    for size in (0, 1, 127, 128, 16383, 16384, 5_000_000):
        row = served_group.Row({"a": ((size,), "uint8")}, 1)
        row.views["a"][...] = 7
        assert row.SerializeToString() == wire.FromServer(row=b"\7" * size).SerializeToString()


def test_the_message_of_a_row_is_what_its_views_say_now():
    fields = {"obs/image": ((2, 3), "uint8"), "obs/number": ((), "float64"), "reward": ((), "float32")}
    row, rng = served_group.Row(fields, 4), np.random.default_rng(0)
    deflated = served_group.Row(fields, 4, deflate=True)
    for _ in range(3):
        image, number, reward = rng.integers(256, size=(4, 2, 3)), rng.normal(size=4), rng.normal(size=4)
        row.views["obs"]["image"][...], row.views["obs"]["number"][...], row.views["reward"][...] = (
            image,
            number,
            reward,
        )
        data = image.astype("uint8").tobytes() + number.tobytes() + reward.astype("float32").tobytes()
        assert row.SerializeToString() == wire.FromServer(row=data).SerializeToString()
        assert wire.FromServer.FromString(row.SerializeToString()).row == data
        deflated.views["obs"]["image"][...], deflated.views["obs"]["number"][...] = image, number
        deflated.views["reward"][...], deflated.metrics = reward, b"{}"
        message = wire.FromServer.FromString(deflated.SerializeToString())
        assert zlib.decompress(message.deflated) == data and message.metrics == b"{}" and not message.row


def test_of_stacks_that_have_shifted_a_deflated_row_has_the_newest_frames():
    fields = {"obs/screen": ((3, 8, 9), "uint8"), "reward": ((), "float32")}
    row, rng, num_shifted = served_group.Row(fields, 4, deflate=True), np.random.default_rng(0), 0
    hello = wire.ServerHello(num_envs=4, fields=[wire.Field(name=n, shape=s, dtype=d) for n, (s, d) in fields.items()])
    stacks = np.zeros((4, 3, 8, 9), np.uint8)
    for _ in range(2):  # streams
        last: dict[str, np.ndarray] = {}
        for t in range(30):
            is_shifted = rng.random(4) < 0.7
            newest = rng.integers(256, size=(4, 1, 8, 9), dtype=np.uint8)
            shifted = np.concatenate([stacks[:, 1:], newest], 1)
            stacks = np.where(is_shifted.reshape(4, 1, 1, 1), shifted, newest)
            row.views["obs"]["screen"][...], row.views["reward"][...] = stacks, t
            message = wire.FromServer.FromString(row.SerializeToString())
            arrays = arrays_of(message, hello, last)
            np.testing.assert_array_equal(arrays["obs/screen"], stacks)
            np.testing.assert_array_equal(arrays["reward"], [t] * 4)
            num_shifted += (t > 0) * is_shifted.sum()
            expected = 4 * (1 + 3 * 72 + 4) - (t > 0) * is_shifted.sum() * 2 * 72
            assert len(zlib.decompress(message.deflated)) == expected
        row.begin()
    assert num_shifted > 100


def test_rows_have_memory_of_their_own_which_their_views_keep():
    def image_of_a_new_row(value: int):
        image = served_group.Row({"obs/image": ((100_000,), "uint8")}, 1).views["obs"]["image"]
        image[...] = value
        return image

    images = [image_of_a_new_row(value) for value in range(200)]  # freed memory would be used again
    assert [int(image.min()) for image in images] == [int(image.max()) for image in images] == list(range(200))


def test_structures_keep_their_nesting():
    message = wire.structure_message({"b": ("x", ["y"]), "a": (), "c": {}}, {"x": 0, "y": 1})
    parts = message.dict.parts
    assert set(parts) == {"a", "b", "c"}
    assert [part.WhichOneof("kind") for part in parts["b"].tuple.parts] == ["field", "tuple"]
    assert parts["b"].tuple.parts[0].field == 0 and parts["b"].tuple.parts[1].tuple.parts[0].field == 1
    assert parts["a"].WhichOneof("kind") == "tuple" and parts["c"].WhichOneof("kind") == "dict"


def test_the_arrays_of_a_nest_arrive_in_their_places():
    structure = wire.structure_message({"b": ("x", ["z", "y"]), "a": "y"}, {"x": 0, "y": 1, "z": 2})
    message = wire.Array(structure=structure, parts=[array_message(np.array(value)) for value in (10, 11, 12)])
    nest = wire.nest_from_message(wire.Array.FromString(message.SerializeToString()))
    assert nest == {"a": 11, "b": (10, (12, 11))}


@pytest.mark.parametrize("dtype", wire.DTYPES)
def test_arrays_arrive_as_they_were(dtype):
    for array in (np.ones((2, 3), dtype), np.ones((), dtype), np.ones((0, 4), dtype), np.eye(3, 5).T.astype(dtype)):
        arrived = wire.array_from_message(wire.Array.FromString(array_message(array).SerializeToString()))
        np.testing.assert_array_equal(arrived, array)
        assert arrived.dtype == dtype


def test_malformed_arrays_are_refused():
    for fields in (
        dict(dtype="int64", shape=[2], data=b"\0" * 15),
        dict(dtype="int64", shape=[-1], data=b""),
        dict(dtype="int64", shape=[2**40, 2**40], data=b""),
        dict(dtype="object", shape=[1], data=b"\0" * 8),
        dict(dtype="", shape=[], data=b""),
    ):
        with pytest.raises(ValueError, match="came for an array|is not one that can be sent"):
            wire.array_from_message(wire.Array(**fields))
    with pytest.raises(ValueError, match="complex64"):
        array_message(np.zeros(1, np.complex64))


# ------------------------------------------------------------------------------------------------ spaces

SPACES = {
    "image": spaces.Box(0, 255, (4, 84, 84), np.uint8),
    "unbounded": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "half bounded": spaces.Box(np.array([-1.1, -np.inf], np.float32), np.array([np.inf, 0.3], np.float32)),
    "bool": spaces.Box(0, 1, (10, 10, 4), bool),
    "half": spaces.Box(-0.1, 0.1, (2,), np.float16),
    "number": spaces.Box(0, 1, (), np.float32),
    "nothing": spaces.Box(0, 1, (0, 3), np.float32),
    "int64": spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
    "uint64": spaces.Box(np.array([0, 1], np.uint64), np.array([2**64 - 1, 2**63 + 1], np.uint64), dtype=np.uint64),
    "discrete": spaces.Discrete(5),
    "discrete from -2": spaces.Discrete(3, start=-2),
    "multi-discrete": spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]),
    "multi-discrete int32": spaces.MultiDiscrete([2, 3], np.int32),
    "multi-binary": spaces.MultiBinary(4),
    "multi-binary image": spaces.MultiBinary([2, 3]),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Tuple((spaces.MultiBinary(1), spaces.Discrete(3))))),
    "empty tuple": spaces.Tuple(()),
    "dict": spaces.Dict(
        collections.OrderedDict(
            [("z", spaces.Discrete(2)), ("a", spaces.Dict([("y", spaces.Discrete(3)), ("b", spaces.MultiBinary(2))]))]
        )
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_a_space_comes_back_from_its_json(name):
    space, back = SPACES[name], wire.space_from_json(wire.space_to_json(SPACES[name]))
    assert back == space
    assert repr(back) == repr(space)  # which shows dtypes and the order of keys too
    if isinstance(space, spaces.Box):  # Box compares its bounds with a tolerance
        np.testing.assert_array_equal(back.low, space.low)
        np.testing.assert_array_equal(back.high, space.high)
        assert back.low.dtype == space.low.dtype


def test_a_discrete_space_of_another_dtype_comes_back():
    try:
        space = spaces.Discrete(3, dtype=np.int32)
    except TypeError:
        pytest.skip("this gymnasium knows int64 only")
    assert wire.space_from_json(wire.space_to_json(space)) == space


def test_equal_bounds_take_no_more_than_one_number():
    assert len(wire.space_to_json(SPACES["image"])) < 200


def test_spaces_that_cannot_be_sent_are_named():
    with pytest.raises(InputError, match="Text.*cannot be sent"):
        wire.space_to_json(spaces.Tuple((spaces.Text(3),)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"type": "Sequence"}',
        '{"type": "Box", "shape": [1099511627776], "dtype": "uint8", "low": 0, "high": 1}',
        '{"type": "Box", "shape": [2], "dtype": "uint8", "low": [0, 0, 0], "high": 1}',
        '{"type": "Box", "shape": [1], "dtype": "object", "low": 0, "high": 1}',
        '{"type": "Box", "shape": ["2"], "dtype": "uint8", "low": 0, "high": 1}',
        '{"type": "Discrete", "n": "2", "start": 0, "dtype": "int64"}',
        '{"type": "Discrete", "n": 0, "start": 0, "dtype": "int64"}',
        '{"type": "Tuple", "spaces": ' * 100_000,
        '{"type": "Tuple", "spaces": [' * 5000 + "]}" * 5000,
    ],
    ids=lambda text: text[:60] or "empty",
)
def test_json_of_no_space_is_refused(text):
    with pytest.raises(InputError, match="no space is described by"):
        wire.space_from_json(text)


def test_an_env_host_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import polybeast_env; polybeast_env.create_env"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_help_of_an_env_host_needs_neither_torch_nor_tyro_and_says_of_the_environment_what_the_learners_says():
    code = "import sys; sys.modules['torch'] = sys.modules['tyro'] = None; import polybeast_env as p; p.parse_flags()"
    environment = {**os.environ, "COLUMNS": "10000"}
    command = [sys.executable, "-c", code, "--help"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=environment).stdout
    told = read_source(EnvFlags)
    assert told.keys() == {field.name for field in dataclasses.fields(EnvFlags)}
    for name, flag in told.items():
        assert f"--{name} " in printed and " ".join(flag.help.split()) in printed, name


def test_a_flag_of_the_environment_is_a_number_a_choice_or_auto(capsys):
    flags = polybeast_env.parse_flags(["--noops", "7", "--sticky_actions", "auto", "--resize", "4e1", "--env", "a:b"])
    assert (flags.noops, flags.sticky_actions, flags.resize, flags.env) == (7, "auto", 40, "a:b")
    for name, value, message in [
        ("noops", "1.5", "invalid auto or int value: '1.5'"),
        ("grayscale", "yes", "invalid choice: 'yes'"),
        ("resize", "auto", "invalid int value: 'auto'"),
    ]:
        with pytest.raises(SystemExit):
            polybeast_env.parse_flags([f"--{name}", value])
        assert f"argument --{name}: {message}" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ what is served


def test_the_hello_tells_all_that_a_learner_needs(tmp_path):
    with ServerProcess(tmp_path, "toy_envs:Dict-v0", "--group_width", "3") as server, Stream(server.address) as stream:
        hello = stream.hello
    assert (hello.protocol, hello.env, hello.num_envs) == (wire.PROTOCOL, "toy_envs:Dict-v0", 3)
    assert hello.frames_per_step == 1
    assert [(field.name, field.dtype, list(field.shape)) for field in hello.fields] == [
        ("obs/image", "uint8", [8, 8, 1]),
        ("obs/number", "float32", [1]),
        ("reward", "float32", []),
        ("done", "bool", []),
        ("terminated", "bool", []),
        ("truncated", "bool", []),
        ("episode_return", "float32", []),
        ("episode_step", "int32", []),
        ("task", "int32", []),
    ]
    assert {name: part.field for name, part in hello.observation.dict.parts.items()} == {"image": 0, "number": 1}
    assert (hello.action.dtype, list(hello.action.shape)) == ("int64", [])
    assert list(wire.space_from_json(hello.observation_space)) == ["image", "number"]
    assert wire.space_from_json(hello.action_space) == spaces.Discrete(4)


def test_a_learner_that_asks_only_for_the_hello_gets_no_row_and_keeps_no_place(tmp_path):
    with ServerProcess(tmp_path, "toy_envs:Dict-v0", "--max_streams", "1") as server:
        for _ in range(2):
            with Stream(server.address, only_hello=True) as stream:
                assert stream.hello.env == "toy_envs:Dict-v0"
                with pytest.raises(StopIteration):  # the end, in order
                    stream.receive()
        with Stream(server.address) as stream:
            assert stream.row()["done"].all()


def test_a_nest_of_actions_is_for_servers_that_take_any_action(tmp_path):
    with ServerProcess(tmp_path, "toy_envs:Dict-v0") as server, Stream(server.address) as stream:
        actions = array_message(np.zeros(stream.hello.num_envs, np.int64))
        parts = [wire.Structure(field=0), wire.Structure(field=0)]
        structure = wire.Structure(tuple=wire.Structure.Tuple(parts=parts))
        stream.send(wire.Array(parts=[actions], structure=structure))
        stream.row()
        code, text = stream.end()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert text == "the learner sent a nest of 1 actions, the env server takes one array"


class SlowToReset(served_group.VectorEnvGroup):
    def reset(self, seed, views):
        time.sleep(1)
        super().reset(seed, views)


def test_the_hello_comes_after_the_first_reset_and_who_asks_for_it_only_has_no_environments_made(tmp_path):
    """A learner waits longer for the hello than for a row, so that all that is slow has to come before it."""
    address, made, lines = f"unix:{tmp_path / 'envs'}", [], []

    def make(width):
        made.append(width)
        return SlowToReset(envs.make("CartPole-v1", width), 3)

    server = env_server.EnvServer(lambda: make(3), address, example=make(1), log=lines.append)
    server.start()
    for _ in range(3):
        with Stream(address, only_hello=True) as stream:
            assert stream.hello.num_envs == 3
    assert made == [1] and not lines
    began = time.monotonic()
    with Stream(address) as stream:
        assert time.monotonic() - began >= 1, "a reset takes a second"
        assert stream.row()["done"].shape == (3,)
    server.stop()
    assert made == [1, 3]
    resetting, served = (line for line in lines if "closed" not in line)
    assert "made 3 environments for" in resetting and "resetting them" in resetting
    assert "is served 3 environments" in served


def test_a_same_step_environment_sends_its_final_observations_beside_the_others(tmp_path):
    address = f"unix:{tmp_path / 'envs'}"

    def make():
        toys = [lambda: toy_envs.Counting(max_length=3)] * 2
        return served_group.VectorEnvGroup(SyncVectorEnv(toys, autoreset_mode=AutoresetMode.SAME_STEP))

    server = env_server.EnvServer(make, address)
    server.start()
    with Stream(address) as stream:
        names = {
            name: stream.hello.fields[part.field].name for name, part in stream.hello.observation.dict.parts.items()
        }
        assert names == {"obs": "obs/obs", "final_obs/obs": "final_obs/obs"}
        fields = {field.name: (field.dtype, list(field.shape)) for field in stream.hello.fields}
        assert fields["final_obs/obs"] == fields["obs/obs"] == ("float32", [3])
        row = stream.row()
        assert (row["final_obs/obs"] == 0).all()
        num_truncated = 0
        for _ in range(30):
            before, row = row, stream.act(np.zeros(2, np.int64))
            for k in np.flatnonzero(row["truncated"]):
                num_truncated += 1
                expected = before["obs/obs"][k] + [0, 0, 1]  # seed, episode, one step more
                np.testing.assert_array_equal(row["final_obs/obs"][k], expected)
                np.testing.assert_array_equal(row["obs/obs"][k], expected * [1, 1, 0] + [0, 1, 0])
        assert num_truncated > 5 and not (row["terminated"] & row["truncated"]).any()
    server.stop()


@pytest.mark.parametrize("env", ["Counting", "Dict", "MultiDiscrete", "Tuple", "Buttons"])
@pytest.mark.parametrize("width", [1, 8])
def test_rows_are_those_of_the_same_environments_here(tmp_path, env, width):
    env_id, seed = f"toy_envs:{env}-v0", 17
    group = EnvGroup(envs.make(env_id, width))
    rng = np.random.default_rng(0)
    with (
        ServerProcess(tmp_path, env_id, "--group_width", str(width)) as server,
        Stream(server.address, seed=seed, env=env_id) as stream,
    ):
        here = {field.name: np.zeros((width, *field.shape), field.dtype) for field in stream.hello.fields}
        space, (shape, _) = wire.space_from_json(stream.hello.action_space), group.fields["action"]
        sizes = category_sizes(space)
        ends = 0
        group.reset(seed, nest_observations(here))
        there = stream.row()
        for _ in range(200):
            for name, array in here.items():
                np.testing.assert_array_equal(there[name], array, err_msg=name)
            ends += (here["terminated"] | here["truncated"]).sum()
            actions = rng.integers(sizes, size=(width, len(sizes))).reshape(width, *shape)
            there = stream.act(actions)
            group.step(actions, nest_observations(here))
    group.close()
    assert ends > 20 * width


def test_a_seed_of_64_bits_is_taken(tmp_path):
    with ServerProcess(tmp_path, "CartPole-v1", "--group_width", "2") as server:
        first = []
        for seed in (2**64 - 1, (2**64 - 1) % (2**31 - 2), 5):
            with Stream(server.address, seed=seed) as stream:
                first.append(stream.row()["obs/obs"])
    np.testing.assert_array_equal(first[0], first[1])
    assert (first[0] != first[2]).any()


def test_zero_dimensional_observations_keep_their_shape_and_their_names(tmp_path):
    with (
        ServerProcess(tmp_path, "server_toys:Scalar-v0", "--group_width", "2") as server,
        Stream(server.address) as stream,
    ):
        stream.row()
        row = stream.act(np.zeros(2, np.int64))
    assert row["obs/reward"].shape == row["obs/level"].shape == (2,)
    assert row["obs/reward"].dtype == np.int64
    np.testing.assert_array_equal(row["reward"], [0.5, 0.5])


def test_an_observation_may_be_larger_than_4_mb(tmp_path):
    with (
        ServerProcess(tmp_path, "server_toys:Large-v0", "--group_width", "2") as server,
        Stream(server.address) as stream,
    ):
        stream.row()
        row = stream.act(np.zeros(2, np.int64))
    assert row["obs/obs"].shape == (2, 6_000_000) and (row["obs/obs"] == 8).all()


def test_every_dtype_and_transposed_memory_arrive(tmp_path):
    with (
        ServerProcess(tmp_path, "server_toys:Dtypes-v0", "--group_width", "2") as server,
        Stream(server.address) as stream,
    ):
        stream.row()
        row = stream.act(np.zeros(2, np.int64))
    for name in wire.DTYPES:
        assert row[f"obs/{name}"].dtype == name
        np.testing.assert_array_equal(row[f"obs/{name}"][1], np.array([[0, 0, 0], [1, 1, 1]]).astype(name))


def test_two_streams_step_at_the_same_time(tmp_path):
    with (
        ServerProcess(tmp_path, "server_toys:Meeting-v0", "--group_width", "1") as server,
        Stream(server.address) as one,
        Stream(server.address) as other,
    ):
        for stream in (one, other):
            stream.row()
            stream.act(np.zeros(1, np.int64))
        for stream in (one, other):
            stream.send(array_message(np.zeros(1, np.int64)))
        assert one.row()["reward"] == other.row()["reward"] == 0.5


def test_a_stream_more_than_there_are_places_is_refused_and_a_freed_place_is_given_away(tmp_path, monkeypatch):
    monkeypatch.setattr(env_server, "PLACE_SECONDS", 0.2)
    address, lines = f"unix:{tmp_path / 'envs'}", []
    server = env_server.EnvServer(
        lambda: served_group.VectorEnvGroup(envs.make("CartPole-v1", 2)), address, max_streams=1, log=lines.append
    )
    server.start()
    with Stream(address), Stream(address, wait_for_hello=False) as second:
        code, details = second.end()
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "--max_streams" in details
    assert details in "\n".join(lines)
    monkeypatch.setattr(env_server, "PLACE_SECONDS", PATIENCE)
    with Stream(address) as third:
        third.row()
    server.stop()


# -------------------------------------------------------------------------------------- what is refused


def refusal(server: ServerProcess, **hello) -> tuple[grpc.StatusCode, str]:
    """Status and message with which a hello is refused, once the server's log has the same message."""
    with Stream(server.address, wait_for_hello=False, **hello) as stream:
        code, details = stream.end()
    assert details in server.errors()
    return code, details


def test_a_learner_that_does_not_fit_is_told_what_both_sides_have(tmp_path, token_file):
    with ServerProcess(tmp_path, "CartPole-v1", "--token_file", str(token_file)) as server:
        assert refusal(server, token="sesame", protocol=99) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the learner speaks version 99 of the protocol, the env server version {wire.PROTOCOL}: "
            "install the same version of Beast on both",
        )
        for token, what in (("", "no token"), ("sesam", "a wrong token")):
            code, details = refusal(server, token=token)
            assert code == grpc.StatusCode.UNAUTHENTICATED
            assert what in details and "--token_file" in details and "sesame" not in details
        code, details = refusal(server, token="sesame", env="Pong-v0")
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "'Pong-v0'" in details and "'CartPole-v1'" in details
        with Stream(server.address, token="sesame", env="CartPole-v1") as stream:
            stream.row()


ZEROS = np.zeros(4, np.int64)
BAD_MESSAGES = {
    "shape": (array_message(ZEROS[:3]), r"int64 \[3\].*int64 \[4\]"),
    "rank": (array_message(ZEROS[:, None]), r"int64 \[4, 1\].*int64 \[4\]"),
    "dtype": (array_message(ZEROS.astype("int32")), r"int32 \[4\].*int64 \[4\]"),
    "bytes": (wire.Array(dtype="int64", shape=[4], data=b"\0" * 31), "31 bytes"),
    "nothing": (wire.Array(), "int64"),
    "a terminal's codes": (wire.Array(dtype="\x1b]0;x\x07" + "y" * 50_000), r"^[^\x00-\x1f]*$"),
}


def test_actions_that_are_not_the_hellos_are_refused(tmp_path):
    with ServerProcess(tmp_path, "CartPole-v1", "--group_width", "4") as server:
        for message, expected in BAD_MESSAGES.values():
            with Stream(server.address) as stream:
                stream.row()
                stream.send(message)
                code, details = stream.end()
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert re.search(expected, details), details
            assert details in server.errors()


def test_compressed_actions_are_refused_before_they_grow(tmp_path):
    zeros = b"\xfa\x07\xac\x02" + bytes(300)  # a field that rpcenv.proto has not, which compresses well
    actions = wire.Array.FromString(array_message(np.zeros(4, np.int64)).SerializeToString() + zeros)
    with ServerProcess(tmp_path, "CartPole-v1", "--group_width", "4") as server:
        with Stream(server.address) as stream:
            stream.row()
            stream.send(actions)
            stream.row()
        channel = grpc.insecure_channel(server.address, compression=grpc.Compression.Gzip)
        with Stream(server.address, channel=channel) as stream:
            stream.row()
            stream.send(actions)
            code, details = stream.end()
    assert code == grpc.StatusCode.INTERNAL and "deserializing" in details


def test_a_call_without_a_hello_or_token_is_refused_before_it_has_a_thread_or_a_message(tmp_path, token_file):
    with ServerProcess(tmp_path, "CartPole-v1", "--token_file", str(token_file)) as server:
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        big, never = b"x" * 60_000_000, queue.SimpleQueue()
        with contextlib.ExitStack() as stack:
            for index in range(300):
                channel = stack.enter_context(grpc.insecure_channel(server.address))
                sent = [[], [("hello-bin", b"\xff\xff")], headers("wrong"), headers("")][index % 4]
                messages = iter([big]) if index % 30 == 0 else iter(never.get, None)
                call = channel.stream_stream(wire.STREAM)(messages, timeout=PATIENCE, metadata=sent)
                with pytest.raises(grpc.RpcError):
                    next(call)
                expected = "UNAUTHENTICATED" if index < throttle.FREE_GUESSES else "UNAUTHENTICATED RESOURCE_EXHAUSTED"
                assert call.code().name in expected.split(), call.details()
                never.put(None)
        time.sleep(1.1)  # the guesses of this host have used up its tries
        with Stream(server.address, token="sesame") as stream:
            stream.row()
        assert process.memory_info().rss - before < 100_000_000
        assert server.errors().count("refused") < 50, "a log is not filled"


def test_connections_that_say_nothing_end_and_shut_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr(env_server, "CONNECTING_MS", 500)
    server = env_server.EnvServer(lambda: served_group.VectorEnvGroup(envs.make("CartPole-v1", 2)), "127.0.0.1:0")
    server.start()
    host, port = server.address.split(":")
    with contextlib.ExitStack() as stack:
        mute = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(200)]
        with Stream(server.address) as stream:
            stream.row()
        for connection in mute:
            connection.settimeout(PATIENCE)
            while connection.recv(1000):  # the server's half of the connecting, and then its end
                pass
    server.stop()


def test_a_learner_that_leaves_while_environments_are_reset_does_not_end_the_server(tmp_path, monkeypatch):
    address, ends = f"unix:{tmp_path / 'envs'}", []
    monkeypatch.setattr(served_group, "end_stuck", lambda peer, log: ends.append(peer))
    lines: list[str] = []
    server = env_server.EnvServer(
        lambda: SlowToReset(envs.make("CartPole-v1", 2)), address, stuck_seconds=0.1, log=lines.append
    )
    server.start()
    with Stream(address, wait_for_hello=False):
        wait_until(lambda: any("made 2 environments for" in line for line in lines))
    wait_until(lambda: any("closed the environments" in line for line in lines))
    assert not ends
    with Stream(address) as stream:
        stream.row()
    server.stop()


class SlowToStep(served_group.VectorEnvGroup):
    def step(self, actions, views):
        time.sleep(2)
        super().step(actions, views)


def test_a_server_ends_where_an_environment_still_steps_long_after_its_learner_left(tmp_path, monkeypatch):
    address, ends = f"unix:{tmp_path / 'envs'}", []
    monkeypatch.setattr(served_group, "end_stuck", lambda peer, log: ends.append(peer))
    server = env_server.EnvServer(lambda: SlowToStep(envs.make("CartPole-v1", 2)), address, stuck_seconds=0.2)
    server.start()
    with Stream(address) as stream:
        stream.row()
        stream.send(array_message(np.zeros(2, np.int64)))
        time.sleep(0.2)
    wait_until(lambda: ends)
    server.stop()


class SlowToClose(served_group.VectorEnvGroup):
    def close(self):
        time.sleep(2)
        super().close()


@pytest.mark.parametrize("closing_seconds", [PATIENCE, 0.2])
def test_closing_has_a_limit_of_its_own(tmp_path, monkeypatch, closing_seconds):
    monkeypatch.setattr(served_group, "CLOSING_SECONDS", closing_seconds)
    address, ends, lines = f"unix:{tmp_path / 'envs'}", [], []
    monkeypatch.setattr(served_group, "end_stuck", lambda peer, log: ends.append(peer))
    server = env_server.EnvServer(
        lambda: SlowToClose(envs.make("CartPole-v1", 2)), address, stuck_seconds=0.2, log=lines.append
    )
    server.start()
    with Stream(address) as stream:
        stream.row()
    wait_until(lambda: any("closed the environments" in line for line in lines))
    assert len(ends) == (closing_seconds < 1)
    server.stop()


class Link(threading.Thread):
    """A TCP port that leads to another one, until the link is cut: then nothing arrives, and nobody is told."""

    def __init__(self, address: str):
        super().__init__(daemon=True)
        self._host, self._port = address.rsplit(":", 1)
        self._listener, self._is_cut = socket.create_server(("127.0.0.1", 0)), threading.Event()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.start()

    def run(self):
        near, _ = self._listener.accept()
        far = socket.create_connection((self._host, int(self._port)))
        threading.Thread(target=self._carry, args=(far, near), daemon=True).start()
        self._carry(near, far)

    def _carry(self, source: socket.socket, target: socket.socket):
        while (data := source.recv(65536)) and not self._is_cut.is_set():
            target.sendall(data)

    def cut(self):
        self._is_cut.set()


def test_a_learner_that_is_lost_without_a_word_is_missed_after_the_two_times_of_keepalive(monkeypatch):
    monkeypatch.setattr(env_server, "KEEPALIVE", [(name, value // 20) for name, value in env_server.KEEPALIVE])
    lines: list[str] = []
    server = env_server.EnvServer(
        lambda: served_group.VectorEnvGroup(envs.make("CartPole-v1", 2)), "127.0.0.1:0", log=lines.append
    )
    server.start()
    link = Link(server.address)
    with Stream(link.address) as stream:
        stream.row()
        link.cut()
        wait_until(lambda: any("closed the environments" in line for line in lines), seconds=20)
    server.stop()


def test_who_guesses_tokens_has_to_wait_and_streams_go_on(unix):
    def make_group():
        return served_group.VectorEnvGroup(envs.make("CartPole-v1", 2))

    server = env_server.EnvServer(make_group, unix, token="sesame")
    server.start()

    def code(token: str) -> grpc.StatusCode:
        with Stream(unix, token=token, wait_for_hello=False, only_hello=True) as stream:
            return stream.end()[0]

    with Stream(unix, token="sesame") as stream:
        stream.row()
        answers = [code(f"guess {number}") for number in range(25)]
        assert answers[:20] == [grpc.StatusCode.UNAUTHENTICATED] * 20, answers
        assert answers[-1] == code("sesame") == grpc.StatusCode.RESOURCE_EXHAUSTED, "nothing tells the right one"
        stream.act(np.zeros(2, np.int64))
        time.sleep(1.1)
        assert code("sesame") == grpc.StatusCode.OK
    server.stop()


def test_a_network_of_ipv6_guesses_as_one(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(throttle.time, "monotonic", lambda: now[0])
    guesses = throttle.Guesses()
    for number in range(20):
        assert guesses.may_try(peer := f"ipv6:%5Bfd00::{number}%5D:{4000 + number}")
        guesses.was_wrong(peer)
    assert not guesses.may_try("ipv6:%5Bfd00::ffff:1%252%5D:1") and guesses.may_try("ipv6:%5Bfd00:1:2:3::%5D:1")
    assert guesses.may_try("ipv4:10.0.0.1:1")
    now[0] += 1
    assert guesses.may_try(peer)
    guesses.was_wrong(peer)
    assert not guesses.may_try(peer)
    now[0] += 10
    assert guesses.may_try(peer)


def test_sources_of_guesses_that_are_long_gone_are_forgotten():
    guesses = throttle.Guesses()
    for number in range(3 * throttle.MAX_SOURCES):
        guesses.was_wrong(f"ipv4:10.{number >> 16}.{number >> 8 & 255}.{number & 255}:1")
    assert len(guesses._all_paid) <= throttle.MAX_SOURCES


def test_with_tls_a_learner_with_the_certificate_is_served_and_plain_text_is_not(tmp_path, token_file, certificate):
    cert, key = certificate
    flags = ["--token_file", str(token_file), "--tls_cert", str(cert), "--tls_key", str(key)]
    with ServerProcess(tmp_path, "CartPole-v1", *flags, address="127.0.0.1:0") as server:
        with Stream(server.address, wait_for_hello=False, token="sesame") as plain:
            assert plain.end()[0] == grpc.StatusCode.UNAVAILABLE
        stranger = grpc.secure_channel(server.address, grpc.ssl_channel_credentials())
        with Stream(server.address, channel=stranger, wait_for_hello=False, token="sesame") as unknown:
            code, details = unknown.end()
            assert code == grpc.StatusCode.UNAVAILABLE and "CERTIFICATE_VERIFY_FAILED" in details
        channel = grpc.secure_channel(server.address, grpc.ssl_channel_credentials(cert.read_bytes()))
        with Stream(server.address, channel=channel, token="sesame") as stream:
            stream.row()


# ---------------------------------------------------------------------------- where a server may listen


def test_only_addresses_of_this_machine_are_free():
    local = ["unix:/tmp/x", "127.0.0.1:1", "127.8.8.8:1", "[::1]:0", "localhost:65535"]
    assert [address for address in local if not security.is_local(address)] == []
    wide = ["0.0.0.0:1", "[::]:1", "192.168.0.1:1", "localhost.example.com:1", "127.example.com:1"]
    assert [address for address in wide if security.is_local(address)] == []
    for malformed in ("", "host", ":1", "host:", "host:x", "host:65536", "host:-1", "/tmp/x"):
        with pytest.raises(InputError, match="neither unix:/path nor host:port"):
            security.is_local(malformed)


def test_a_wide_address_needs_token_and_tls_or_the_word_insecure(token_file, certificate):
    cert, key = map(str, certificate)
    protected = {"token_file": str(token_file), "tls_cert": cert, "tls_key": key}
    token, tls = security.security("0.0.0.0:1", **protected)
    assert token == "sesame" and b"PRIVATE KEY" in tls[0] and b"CERTIFICATE" in tls[1]
    assert security.security("0.0.0.0:1", insecure=True) == ("", None)
    assert security.security("127.0.0.1:1") == security.security("unix:/x") == ("", None)
    for missing in ({"token_file": ""}, {"tls_cert": "", "tls_key": ""}, dict.fromkeys(protected, "")):
        with pytest.raises(InputError, match="other machines can reach 0.0.0.0:1: give --token_file.*--insecure"):
            security.security("0.0.0.0:1", **{**protected, **missing})
    with pytest.raises(InputError, match="give both, or neither"):
        security.security("127.0.0.1:1", tls_cert=cert)
    with pytest.raises(InputError, match="needs no TLS"):
        security.security("unix:/x", **protected)
    with pytest.raises(InputError, match="--tls_key /nowhere cannot be read: No such file"):
        security.security("127.0.0.1:1", tls_cert=cert, tls_key="/nowhere")
    with pytest.raises(InputError, match=f"--tls_cert {key} holds no certificate: "):
        security.security("127.0.0.1:1", tls_cert=key, tls_key=key)
    readable = token_file.parent / "key.pem"
    readable.write_bytes(Path(key).read_bytes())
    readable.chmod(0o644)
    with pytest.raises(InputError, match="--tls_key .*can be read by other users .mode 644.: chmod 600"):
        security.security("127.0.0.1:1", tls_cert=cert, tls_key=str(readable))


def test_a_token_file_must_be_there_hold_something_and_be_its_owners_alone(token_file):
    assert security.read_token(str(token_file)) == "sesame"
    token_file.chmod(0o640)
    with pytest.raises(InputError, match="can be read by other users .mode 640.: chmod 600"):
        security.read_token(str(token_file))
    token_file.chmod(0o600)
    token_file.write_text(" \n")
    with pytest.raises(InputError, match="is empty"):
        security.read_token(str(token_file))
    for content in (b"\xff\xfe", "sésame".encode(), b"two words", b"x" * 1001):
        token_file.write_bytes(content)
        with pytest.raises(InputError, match="must hold at most 1000 characters, ASCII and without spaces"):
            security.read_token(str(token_file))
    token_file.unlink()
    with pytest.raises(InputError, match="cannot be read: No such file"):
        security.read_token(str(token_file))


@pytest.fixture
def refused_start(run_main):
    """A function of flags: what a server that does not start says, which must be one message and no traceback."""

    def start(*flags: str) -> str:
        code, output = run_main(polybeast_env, "--env", "CartPole-v1", *flags)
        assert code == 1
        return output

    return start


def test_flags_that_cannot_be_are_refused_at_the_start(tmp_path, refused_start, certificate):
    _, key = certificate
    assert "error: other machines can reach 0.0.0.0:0" in refused_start("--address", "0.0.0.0:0")
    assert "--group_width 0: it must lie between 1 and" in refused_start("--group_width", "0")
    assert "AF_UNIX path too long" in refused_start("--address", f"unix:/tmp/{'x' * 120}")
    other_cert, _ = make_certificate(tmp_path, "DNS:localhost")
    garbage = refused_start("--address", "127.0.0.1:0", "--tls_cert", str(other_cert), "--tls_key", str(key))
    assert "TLS key and certificate do not fit" in garbage


@pytest.mark.parametrize(
    "env, expected",
    [
        (
            "server_toys:CannotBeMade-v0",
            r"RuntimeError: this toy cannot be made \(\S+server_toys.py:\d+, in __init__\)",
        ),
        ("NoSuchGame-v0", "no environment is called 'NoSuchGame-v0'"),
        (
            'toy_envs:CrashAtStep-v0 --env_kwargs={"n":1}',
            r"step\(\) raised RuntimeError: this toy breaks here \(\S+toy_",
        ),
    ],
)
def test_a_server_checks_its_environment_before_it_says_that_it_serves(tmp_path, refused_start, env, expected):
    output = refused_start("--address", f"unix:{tmp_path / 'envs'}", "--env", *env.split())
    assert re.match(f"error: .*{expected}", output) and "serving" not in output and "Traceback" not in output


def test_a_port_or_socket_that_is_taken_is_refused_and_its_server_goes_on(tmp_path, refused_start):
    for address in ("127.0.0.1:0", f"unix:{tmp_path / 'envs'}"):
        with ServerProcess(tmp_path, "CartPole-v1", address=address) as server:
            assert f"cannot listen on {server.address}" in refused_start("--address", server.address)
            with Stream(server.address) as stream:
                stream.row()


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path, refused_start):
    (tmp_path / "envs").write_text("precious")
    assert "no socket" in refused_start("--address", f"unix:{tmp_path / 'envs'}")
    assert (tmp_path / "envs").read_text() == "precious"


def test_a_unix_socket_is_its_owners_alone(tmp_path):
    with ServerProcess(tmp_path, "CartPole-v1") as server:
        assert server.socket.stat().st_mode & 0o077 == 0


# -------------------------------------------------------------------------------- what happens when it fails


def failure(server: ServerProcess) -> tuple[int, str]:
    """Actions taken until the environment failed, and the traceback that the stream then got; it is in the log too."""
    with Stream(server.address, wait_for_hello=False) as stream:
        steps = -1  # the first row follows the hello without an action
        while (message := stream.receive()).WhichOneof("kind") != "error":
            if message.WhichOneof("kind") == "row":
                steps += 1
                stream.send(array_message(np.zeros(2, np.int64)))
        code, details = stream.end()
    assert code == grpc.StatusCode.ABORTED and details.endswith(message.error.splitlines()[-1])
    assert message.error in server.errors()
    return steps, message.error


@pytest.mark.parametrize(
    "env, fewest_steps, expected",
    [
        ("toy_envs:CrashInReset-v0", -1, "RuntimeError: this toy cannot be reset"),
        ("toy_envs:CrashAtStep-v0", 49, "RuntimeError: this toy breaks here"),
        ("server_toys:Exits-v0", 1, "SystemExit: this toy exits"),
    ],
)
def test_an_environment_that_raises_tells_the_learner_and_the_next_stream_gets_new_ones(
    tmp_path, env, fewest_steps, expected
):
    with ServerProcess(tmp_path, env, "--group_width", "2") as server:
        for _ in range(3):  # more than there are places
            steps, error = failure(server)
            assert steps >= fewest_steps and (steps == fewest_steps or fewest_steps > 1)
            assert error.startswith("Traceback") and expected in error.splitlines()[-1]


def test_the_learner_is_told_of_an_action_outside_the_space(tmp_path):
    with ServerProcess(tmp_path, "CartPole-v1", "--group_width", "2") as server, Stream(server.address) as stream:
        stream.row()
        stream.send(array_message(np.array([0, 7])))
        assert "actions [0, 7] are not all in Discrete(2)" in stream.receive().error


def test_environments_are_closed_when_their_learner_leaves(tmp_path):
    with ServerProcess(tmp_path, "toy_envs:StartsProcess-v0", "--group_width", "2") as server:
        me = psutil.Process(server.process.pid)
        with Stream(server.address) as stream:
            stream.row()
            assert len(me.children()) == 2
        wait_until(lambda: not me.children())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_its_environments_and_its_socket(tmp_path, number):
    with ServerProcess(tmp_path, "toy_envs:StartsProcess-v0", "--group_width", "2") as server:
        with Stream(server.address) as stream:
            stream.row()
            children = psutil.Process(server.process.pid).children()
            server.process.send_signal(number)
            assert server.exit_code() == 0, server.errors()
            assert stream.end()[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert len(children) == 2 and not any(child.is_running() for child in children)
        assert not server.socket.exists()
        assert "Traceback" not in server.errors()


def test_a_hanging_environment_does_not_hold_up_the_end(tmp_path):
    with (
        ServerProcess(tmp_path, "server_toys:Hangs-v0", "--group_width", "1") as server,
        Stream(server.address) as stream,
    ):
        step_until_it_hangs(server, stream)
        server.process.terminate()
        assert server.exit_code() == 0
        assert not server.socket.exists()


def test_a_server_whose_log_nobody_reads_serves_on(tmp_path):
    with ServerProcess(tmp_path, "CartPole-v1", "--group_width", "2", prefix=WITHOUT_READER) as server:
        for _ in range(2):
            with Stream(server.address) as stream:
                stream.row()
                stream.act(np.zeros(2, np.int64))
        server.process.terminate()
        assert server.exit_code() == 0 and not server.socket.exists()


def test_environments_that_end_the_program_when_they_are_closed_are_logged():
    class Exits:
        def close(self):
            sys.exit("this toy exits")

    lines: list[str] = []
    served_group.close_group(Exits(), "127.0.0.1:1", lines.append)
    assert "did not close" in lines[0] and "SystemExit: this toy exits" in lines[0]


def test_an_example_that_cannot_be_described_is_closed(tmp_path):
    address, closed = f"unix:{tmp_path / 'envs'}", threading.Event()

    class TooLong(served_group.VectorEnvGroup):
        def __init__(self):
            super().__init__(envs.make("CartPole-v1", 1))
            self.action_space = " " * wire.MAX_HELLO_BYTES

        def close(self):
            super().close()
            closed.set()

    server = env_server.EnvServer(TooLong, address)
    server.start()
    with Stream(address, wait_for_hello=False, only_hello=True) as stream:
        code, details = stream.end()
    assert code == grpc.StatusCode.ABORTED and "the description of the spaces has" in details
    assert closed.is_set()
    server.stop()


class Raising(served_group.VectorEnvGroup):
    """Its traceback is longer than a learner takes, and has a character that UTF-8 has not."""

    def step(self, actions, views):
        raise RuntimeError("é" * served_group.MAX_ERROR + "\udcff")


def test_a_traceback_that_cannot_be_sent_as_it_is_is_escaped_and_cut(tmp_path):
    address = f"unix:{tmp_path / 'envs'}"
    server = env_server.EnvServer(lambda: Raising(envs.make("CartPole-v1", 2)), address)
    server.start()
    with Stream(address) as stream:
        stream.row()
        stream.send(array_message(np.zeros(2, np.int64)))
        error = stream.receive().error
        assert error.endswith("éé\\udcff") and 0 <= served_group.MAX_ERROR - len(error.encode()) < 2
        code, details = stream.end()
    assert code == grpc.StatusCode.ABORTED and details.endswith("\\udcff")
    server.stop()


@pytest.mark.long
def test_a_kept_server_starts_again_when_an_environment_hangs_whose_learner_has_left(tmp_path):
    flags = ["--group_width", "1", "--keep", "--stuck_timeout", "1"]
    with ServerProcess(tmp_path, "server_toys:Hangs-v0", *flags) as server:
        (first,) = psutil.Process(server.process.pid).children()
        with Stream(server.address) as stream:
            step_until_it_hangs(server, stream)
        wait_until(lambda: not first.is_running())
        assert "its environment hangs: this env server ends" in server.errors()
        assert server.process.stdout.readline().startswith("serving ")
        with Stream(server.address) as stream:
            stream.row()
        (second,) = psutil.Process(server.process.pid).children()
        server.process.terminate()
        assert server.exit_code() == 0 and not second.is_running()


def test_a_kept_server_starts_again_when_an_environment_keeps_the_gil(tmp_path):
    flags = ["--group_width", "1", "--keep", "--gil_timeout", "3"]
    with ServerProcess(tmp_path, "server_toys:KeepsGil-v0", *flags) as server:
        with Stream(server.address) as stream:
            step_until_it_hangs(server, stream)
            wait_until(lambda: "kept Python's GIL for longer than --gil_timeout" in server.errors(), seconds=30)
        assert server.process.stdout.readline().startswith("serving ")
        with Stream(server.address) as stream:
            stream.row()


# Kills a kept server one second after it was told to end.
IMPATIENT = """
import polybeast_env
from beast.hosts import serving

serving.KEEP_SECONDS = 1.0
polybeast_env.main()
"""


def test_a_kept_server_is_told_to_end_while_an_environment_keeps_the_gil(tmp_path):
    script, env = tmp_path / "impatient.py", "server_toys:KeepsGil-v0"
    script.write_text(IMPATIENT)
    flags = ["--env", env, "--address", f"unix:{tmp_path / 'envs'}", "--group_width", "1", "--keep"]
    with ServerProcess(tmp_path, env, *flags, script=[str(script)]) as server:
        (kept,) = psutil.Process(server.process.pid).children()
        with Stream(server.address) as stream:
            step_until_it_hangs(server, stream)
        server.process.terminate()
        assert server.process.wait(60) == 0 and not kept.is_running()


def test_a_step_may_take_longer_than_gil_timeout_if_it_keeps_no_gil(tmp_path):
    with ServerProcess(tmp_path, "server_toys:Hangs-v0", "--group_width", "1", "--gil_timeout", "1") as server:
        with Stream(server.address) as stream:
            step_until_it_hangs(server, stream)
            time.sleep(2.5)
            assert server.process.poll() is None


OWN_ALARM = """
import signal
from beast.hosts import serving

class Server:
    failure, socket_path = "", None

    def start(self):
        signal.signal(signal.SIGALRM, lambda *_: setattr(self, "failure", "the alarm of an environment"))
        signal.setitimer(signal.ITIMER_REAL, 0.7)

    def stop(self):
        pass

serving.serve(Server(), "", gil_seconds=600.0)
"""


def test_an_environment_keeps_the_alarm_that_it_has_a_handler_for():
    done = subprocess.run([sys.executable, "-c", OWN_ALARM], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the alarm of an environment" in done.stderr, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for processes")
def test_a_kept_server_that_is_killed_starts_again_whatever_its_environments_started(tmp_path):
    with ServerProcess(tmp_path, "toy_envs:StartsProcess-v0", "--group_width", "1", "--keep") as server:
        (first,) = psutil.Process(server.process.pid).children()
        with Stream(server.address) as stream:
            stream.row()
            (started,) = first.children()
            first.kill()
        wait_until(lambda: not is_alive(started))
        wait_until(lambda: psutil.Process(server.process.pid).children() not in ([], [first]))
        server.process.terminate()
        assert server.exit_code() == 0


def test_a_kept_server_that_cannot_start_ends_and_says_why(tmp_path, refused_start):
    assert "needs a port that stays" in refused_start("--keep", "--address", "127.0.0.1:0")
    (tmp_path / "envs").write_text("no socket")
    done = subprocess.run(
        [
            sys.executable,
            "polybeast_env.py",
            "--env",
            "server_toys:Prints-v0",  # which is not its announcement
            "--keep",
            "--address",
            f"unix:{tmp_path / 'envs'}",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "there is a file of that name" in done.stderr


def test_the_socket_of_a_killed_server_is_replaced(tmp_path):
    with ServerProcess(tmp_path, "CartPole-v1") as server:
        server.process.kill()
        server.process.wait()
    assert server.socket.exists()
    with ServerProcess(tmp_path, "CartPole-v1") as server, Stream(server.address) as stream:
        stream.row()


PARENT = """
import subprocess, sys, os
command = [sys.executable, *sys.argv[1:], "--parent_pid", str(os.getpid())]
server = subprocess.Popen(command, start_new_session=True)
print(server.pid, flush=True)
server.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for processes")
def test_a_server_ends_with_its_parent_however_that_ends(tmp_path):
    command = ["-c", PARENT, str(ROOT / "polybeast_env.py"), "--env", "toy_envs:StartsProcess-v0", "--group_width", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    with subprocess.Popen(
        [sys.executable, *command, "--address", f"unix:{tmp_path / 'envs'}"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        server = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline().startswith("serving ")
        with Stream(f"unix:{tmp_path / 'envs'}") as stream:
            stream.row()
            family = [server, *server.children()]
            assert len(family) == 2
            parent.kill()
            wait_until(lambda: not any(is_alive(process) for process in family))
    assert not (tmp_path / "envs").exists()


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_programs_that_a_serving_process_starts_run_as_others_do():
    """One in 15 to 30 ended before its first instruction, and environments may start programs and fork."""
    script = (
        "import os, subprocess\n"
        "from beast.hosts.env_server import grpc, futures\n"
        "server = grpc.server(futures.ThreadPoolExecutor(1))\n"
        "address = f'127.0.0.1:{server.add_insecure_port(\"127.0.0.1:0\")}'\n"
        "server.start()\n"
        "channel = grpc.insecure_channel(address)\n"
        "grpc.channel_ready_future(channel).result(30)\n"
        "for _ in range(150):\n"
        "    done = subprocess.run(['true'], preexec_fn=os.setpgrp, capture_output=True, timeout=30)\n"
        "    assert (done.returncode, done.stderr) == (0, b''), done\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-1000:]
