"""VizDoom's scenarios: ends, actions, rewards, and what is left of games that crash."""

import contextlib
import dataclasses
import glob
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from test_failures import Training
from waiting import wait_until

from beast import envs
from beast.envs import doom, doom_arena, doom_game, doom_match
from beast.errors import InputError, MissingFile, MissingPackage

ROOT = Path(__file__).resolve().parent.parent
vizdoom = pytest.importorskip("vizdoom", reason="pip install vizdoom")


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Makes `num_envs` environments of an id, whose scenario has these changes."""
    made = []
    monkeypatch.chdir(tmp_path)

    def make(name="Basic", num_envs=1, options=None, **changes):
        monkeypatch.setitem(doom.SCENARIOS, name, dataclasses.replace(doom.SCENARIOS[name], **changes))
        made.append(envs.make(f"Doom/{name}-v0", num_envs, **(options or {})))
        return made[-1]

    yield make
    for env in made:
        env.close()
    assert [*tmp_path.rglob("*")] in ([], [tmp_path / "_vizdoom"]), "DOOM has left files"


def test_a_time_limit_truncates_with_its_true_last_frame(make):
    env = make(limit=330)  # tics, more than in its file: 82 steps of four, and one of two
    first = env.reset(seed=3)[0].copy()
    assert first.shape == (1, 72, 128, 3) and first.dtype == np.uint8
    for step in range(83):
        last, reward, terminated, truncated, info = env.step(np.array([1]))  # to the left
        assert truncated[0] == (step == 82) and not terminated[0]
        assert reward[0] == pytest.approx(-0.04 if step < 82 else -0.02)
    assert info["metrics"]["crashed"][0] == 0
    last = last.copy()
    after, *_ = env.step(np.array([0]))
    assert (last != first).any() and (last != after).any() and last.any()


def test_death_terminates_and_its_reward_is_counted(make):
    env = make("TakeCover", limit=10**6)
    env.reset(seed=0)
    total, length, is_over = 0.0, 0, False
    while not is_over:
        _, reward, terminated, truncated, _ = env.step(np.array([0]))
        total, length, is_over = total + reward[0], length + 1, terminated[0]
        assert not truncated[0]
    assert 4 * (length - 1) <= total <= 4 * length, "a tic alive earns 1"


def test_equal_seeds_begin_equal_episodes(make):
    frames = [make("HealthGathering").reset(seed=seed)[0] for seed in (1, 1, 2)]
    assert (frames[0] == frames[1]).all() and (frames[0] != frames[2]).any()


def test_health_that_rises_is_worth_one_and_health_that_falls_nothing():
    player = doom.Player(doom.SCENARIOS["HealthGathering"])
    seen = [doom_game.Seen(np.zeros((120, 160, 3), np.uint8), {"HEALTH": health}) for health in (90, 92, 92, 50)]
    player.begin(seen[0])
    assert [player.step(each, 0.04, False)[1] for each in seen[1:]] == pytest.approx([1.04, 0.04, 0.04])


def test_a_choice_of_each_head_holds_its_button():
    player = doom.Player(doom.SCENARIOS["DuelBots"])
    assert player.action_space.nvec.prod() == 12_096
    assert doom.Player(doom.SCENARIOS["DeathmatchBots"]).action_space.nvec.prod() == 6_048
    assert doom.Player(doom.SCENARIOS["Battle"]).action_space.nvec.prod() == 396
    names = ["MOVE_FORWARD", "MOVE_BACKWARD", "MOVE_RIGHT", "MOVE_LEFT"]
    names += [f"SELECT_WEAPON{n}" for n in range(1, 8)] + ["ATTACK", "SPEED", "TURN_LEFT_RIGHT_DELTA", "USE"]
    assert not any(player.buttons(np.zeros(7, int)))
    held = dict(zip(names, player.buttons(np.array([2, 1, 7, 1, 0, 10, 1]))))
    wanted = {"MOVE_BACKWARD": 1, "MOVE_RIGHT": 1, "SELECT_WEAPON7": 1, "ATTACK": 1, "USE": 1}
    assert {name: x for name, x in held.items() if x} == {**wanted, "TURN_LEFT_RIGHT_DELTA": -12.5}
    assert player.buttons(np.array([0, 0, 0, 0, 0, 20, 0]))[-2] == 12.5


def test_the_screen_has_the_nearest_pixels(make):
    env = make()
    observation, _ = env.reset(seed=0)
    screen = env.render()[0]
    assert screen.shape == (120, 160, 3)
    for row, column in ((0, 0), (71, 127), (30, 77)):
        assert (observation[0, row, column] == screen[row * 120 // 72, column * 160 // 128]).all()


def variables(**changes) -> dict[str, float]:
    return {**dict.fromkeys(doom.FIGHT_VARIABLES, 0.0), **changes}


def test_shaping_pays_what_was_gained_and_lost_and_nothing_where_a_game_begins_ends_or_goes_on_after_death():
    terms = doom.Terms(doom.SCENARIOS["DuelBots"])
    assert len(terms.coefficients) == 52
    names, worth = list(terms.coefficients), np.array(list(terms.coefficients.values()))

    def paid(is_over=False, **now) -> dict[str, float]:
        amounts = terms.step(variables(**now), is_over)
        return {name: round(x, 6) for name, x in zip(names, (amounts * worth).tolist()) if x}

    terms.begin()
    assert paid(HEALTH=100, FRAGCOUNT=5) == {}
    assert paid(HEALTH=90, FRAGCOUNT=6) == {"HEALTH-": -0.03, "FRAGCOUNT+": 1}
    assert paid(HEALTH=90, FRAGCOUNT=5, DAMAGECOUNT=900, HITCOUNT=9) == {
        "FRAGCOUNT-": -1.5, "DAMAGECOUNT+": 0.6, "HITCOUNT+": 0.05,
    }  # fmt: skip
    assert paid(HEALTH=90, FRAGCOUNT=5, DAMAGECOUNT=900, HITCOUNT=9, WEAPON6=1, AMMO6=20, DEATHCOUNT=1, DEAD=1) == {
        "WEAPON6+": 0.2, "AMMO6+": 0.04, "DEATHCOUNT+": -0.75,
    }  # fmt: skip
    assert paid(HEALTH=100, FRAGCOUNT=5, DEATHCOUNT=1) == {}, "the player has returned"
    assert paid(HEALTH=-999_900, FRAGCOUNT=5, DEATHCOUNT=1) == {"HEALTH-": -0.3}, "no less than dead"
    assert paid(HEALTH=0, is_over=True) == {}
    small = doom.Terms(doom.SCENARIOS["DuelSmall"]).coefficients
    assert {name: x for name, x in small.items() if x} == {
        "FRAGCOUNT+": 1, "DEATHCOUNT+": -1, "DAMAGECOUNT+": 0.01, "HEALTH-": -0.01,
    }, "one player's loss is the other's gain"  # fmt: skip
    terms = doom.Terms(doom.SCENARIOS["DuelSmall"])
    terms.begin()
    held = [terms.step(variables(SELECTED_WEAPON=2, SELECTED_WEAPON_AMMO=50), False) for _ in range(9)]
    assert not np.any(held), "there is one weapon, which nobody can lose"


def test_a_weapon_with_ammunition_is_worth_something_from_its_fifth_step_on():
    terms = doom.Terms(doom.SCENARIOS["Battle"])
    assert list(terms.coefficients) == ["HEALTH+", "HEALTH-", *(f"HELD{slot}" for slot in range(8))]
    terms.begin()
    held = [
        terms.step(variables(SELECTED_WEAPON=3, SELECTED_WEAPON_AMMO=ammo), False) for ammo in (9, 9, 9, 9, 9, 9, 0)
    ]
    assert [each[2 + 3] for each in held] == [0, 0, 0, 0, 1, 1, 0] and terms.coefficients["HELD3"] == 0.001
    assert sum(each.sum() for each in held) == 2


def test_measurements_are_scaled_and_never_negative():
    player = doom.Player(doom.SCENARIOS["Battle"])
    now = variables(
        SELECTED_WEAPON=2, SELECTED_WEAPON_AMMO=150, HEALTH=60, ARMOR=-3, USER2=20, AMMO7=30, WEAPON1=1, PLAYER_COUNT=5
    )
    observation = player.begin(doom_game.Seen(np.zeros((120, 160, 3), np.uint8), now))
    found = observation["measurements"]
    assert found[:7].tolist() == [2, 5, 2, 0, 2, 0, 1] and found[8] == 1 and found[22] == 2 and found.sum() == 15
    assert player.observation_space.contains(observation)


def test_an_objective_counts_from_the_beginning_of_its_episode():
    player = doom.Player(doom.SCENARIOS["DuelBots"])
    frame = np.zeros((120, 160, 3), np.uint8)
    player.begin(doom_game.Seen(frame, variables(FRAGCOUNT=7)))
    for of_bot, won in ((1, 1), (2, 0), (3, 0)):
        player.step(doom_game.Seen(frame, variables(FRAGCOUNT=9, PLAYER2_FRAGCOUNT=of_bot)), 0.0, False)
        info = player.final_info(crashed=0)
        assert info["true_objective"] == 2 and info["metrics"]["won"] == won
    assert "true_objective" not in player.final_info(crashed=1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_game_that_dies_or_hangs_ends_its_episode_and_is_started_again(make, monkeypatch, capfd, how):
    monkeypatch.setattr(doom_game, "STEP_SECONDS", 1.0)
    env = make(num_envs=2)
    env.reset(seed=0)
    before, *_ = env.step(np.array([1, 1]))
    before = before.copy()
    victims = games_of(os.environ[doom_game.OWNER].encode())
    assert len(victims) == 2
    victim = env.envs[1].unwrapped._game._pid
    os.kill(victim, how)
    rescue = threading.Timer(15, os.kill, (victim, signal.SIGKILL))
    rescue.start()
    after, reward, terminated, truncated, info = env.step(np.array([1, 1]))
    assert rescue.is_alive(), "nobody has ended the game"
    rescue.cancel()
    assert truncated.tolist() == [False, True] and not terminated.any() and reward[1] == 0
    assert (after[1] == before[1]).all() and (after[0] != before[0]).any()
    assert info["metrics"]["crashed"][1] == 1 and "is started again" in capfd.readouterr().err
    for _ in range(3):
        _, reward, terminated, truncated, _ = env.step(np.array([1, 1]))
    assert reward[1] == pytest.approx(-0.04) and not (terminated | truncated).any()
    games = games_of(os.environ[doom_game.OWNER].encode())
    assert len(games) == 2 and len({*games} & {*victims}) == 1
    env.close()
    assert not games_of(os.environ[doom_game.OWNER].encode())


def command_lines() -> dict[int, str]:
    found = {}
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found[int(path.split("/")[2])] = Path(path).read_text()
    return found


def ownerless_files() -> list[str]:
    """What no running game has in shared memory."""
    lines = [line for line in command_lines().values() if "viz_instance_id" in line]
    return [path for path in glob.glob("/dev/shm/ViZDoom*") if not any(path[-10:] in line for line in lines)]


def games_of(owner: bytes) -> list[int]:
    found = []
    for pid, line in command_lines().items():
        with contextlib.suppress(OSError):
            if "viz_instance_id" in line and owner in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


@pytest.mark.parametrize("is_playing", [False, True])
def test_a_process_that_is_gone_leaves_no_game_and_no_file(tmp_path, is_playing):
    script = f"""
import os, time
from beast import envs
from beast.envs import doom_game
doom_game._watchdog()
print(os.environ[doom_game.OWNER], flush=True)
env = envs.make("Doom/Basic-v0", 3)
if {is_playing}:
    env.reset()
    print("plays", flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as popen:
        owner = popen.stdout.readline().strip()
        if is_playing:
            popen.stdout.readline()
        wait_until(lambda: len(games_of(owner)) == 3)
        popen.kill()
    wait_until(lambda: not games_of(owner) and not ownerless_files() and not [*tmp_path.iterdir()], seconds=10)


def test_a_run_goes_on_without_an_actor_and_leaves_nothing_without_itself(tmp_path):
    training = Training(tmp_path, "--env", "Doom/DuelSmall-v0", "--num_actors", "1", "--log_steps", "20")
    training.wait_until_training()

    def games() -> set[int]:
        lines, family = command_lines(), {process.pid for process in training.family()}
        return {pid for pid in family if "viz_instance_id" in lines.get(pid, "")}

    first, rows = games(), len(training.rows())
    assert len(first) == 8, "two groups of two duels"
    training.actors()[0].kill()
    training.wait_for(lambda: "Restarting it" in training.text() and len(training.rows()) > rows + 2, "more rows")
    wait_until(lambda: not first & games())
    training.process.kill()
    assert training.end() == -signal.SIGKILL
    wait_until(lambda: not ownerless_files())


def test_flags_of_images_are_honoured_or_refused(make):
    env = make(options={"frame_skip": 8, "grayscale": True, "frame_stack": 2})
    assert env.metadata["frames_per_step"] == 8 and env.metadata["render_fps"] == 35 / 8
    assert env.single_observation_space.shape == (72, 128, 2)
    env.reset(seed=0)
    assert env.step(np.array([1]))[1] == pytest.approx([-0.08])
    assert make().metadata["frames_per_step"] == 4


def test_what_is_wrong_with_an_id_is_told(monkeypatch, tmp_path):
    with pytest.raises(InputError, match="Doom/HealthGathering-v0"):
        envs.make("Doom/HealthGatering-v0", 1)
    with pytest.raises(InputError, match="Doom/Basic-v0"):
        envs.make("Doom/Basic-v1", 1)
    monkeypatch.setenv("BEAST_DOOM_SCENARIOS", str(tmp_path))
    with pytest.raises(MissingFile, match=f"battle.wad is not in VizDoom's package, nor in {tmp_path}: `pip download"):
        envs.make("Doom/Battle-v0", 1)
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    with pytest.raises(MissingPackage, match="pip install vizdoom"):
        envs.make("Doom/Basic-v0", 1)


@pytest.mark.parametrize("name", ["Battle", "Battle2", "DuelBots", "DeathmatchBots"])
def test_scenarios_of_other_packages_are_played_where_their_files_are(make, name):
    if not os.environ.get("BEAST_DOOM_SCENARIOS"):
        pytest.skip("BEAST_DOOM_SCENARIOS names no folder with battle.wad and others (docs/doom.md)")
    env = make(name, limit=200)
    observation, _ = env.reset(seed=1)
    env.action_space.seed(1)
    scores = []
    while len(scores) < 2:
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        if (terminated | truncated).any():
            scores.append(info["true_objective"][0])
    assert observation["screen"].any() and observation["measurements"][0, 2] > 0 and np.isfinite(scores).all()


@pytest.fixture
def match(make, monkeypatch):
    """Makes a small duel with these changes, as columns of a vector env."""

    def match(num_envs=2, **changes):
        monkeypatch.setattr(doom_game, "STEP_SECONDS", 2.0)
        return make("DuelSmall", num_envs, **changes)

    return match


def duel(env) -> doom_match.DoomMatch:
    return env.envs[0]


def test_small_duels_are_fought_in_a_room_of_our_own_whose_players_see_each_other(match, monkeypatch, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    path = doom_game.scenario_file(doom_game.ARENA)
    assert path == cache / "beast/arena.wad" and path.read_bytes() == doom_arena.arena()
    path.write_bytes(b"of an older version")
    env = match(limit=840)
    assert path.read_bytes() == doom_arena.arena()
    env.reset(seed=1)
    games = duel(env)._games

    def of_each(name: str) -> list[float]:
        return [game._game.get_game_variable(getattr(vizdoom.GameVariable, name)) for game in games]

    assert np.allclose(sorted(of_each("ANGLE")), [doom_arena.NORTH, doom_arena.SOUTH])
    assert abs(np.subtract(*of_each("POSITION_Y"))) == doom_arena.DEPTH - 2 * doom_arena.DISTANCE
    assert of_each("POSITION_X") == [doom_arena.WIDTH / 2] * 2
    rewards = np.zeros(2)
    for _ in range(205):  # stand and shoot
        rewards += env.step(np.array([[0, 1], [0, 1]]))[1]
    frags = sum(of_each("FRAGCOUNT"))
    assert frags >= 2, "shots hit who stands opposite"
    assert abs(rewards.sum()) <= 0.15 * frags, "what one gains the other loses, but for damage beyond death"
    assert of_each("SELECTED_WEAPON_AMMO") == [50, 50], "there is no end of it"


def test_players_of_a_match_see_and_do_what_is_theirs_until_its_time_is_over(match):
    env = match(limit=42)
    first = env.reset(seed=1)[0]["screen"].copy()
    assert len(first) == 2 and (first[0] != first[1]).any() and env.metadata["agents"] == 2

    def angles() -> np.ndarray:
        angle = vizdoom.GameVariable.ANGLE
        return np.array([game._game.get_game_variable(angle) for game in duel(env)._games])

    begin = angles()
    for step in range(11):
        last, reward, terminated, truncated, info = env.step(np.array([[1, 0], [0, 0]]))
        assert truncated.tolist() == [step == 10] * 2 and not terminated.any()
    turned = (angles() - begin + 180) % 360 - 180
    assert duel(env)._tics == 42 and (last["screen"][0] != last["screen"][1]).any()
    assert 30 < turned[0] < 43 and turned[1] == 0, "one has turned to the left by a degree in most tics"
    assert info["true_objective"].tolist() == [0, 0] and info["metrics"]["crashed"].tolist() == [0, 0]
    screen = last["screen"].copy()
    after = env.step(np.array([[0, 0], [0, 0]]))[0]["screen"]
    assert (after != screen).any() and duel(env).render().shape == (120, 320, 3)


def test_nobody_is_dead_when_a_match_begins(match):
    env = match()
    for seed in range(6):  # in about half of which two players would begin in one place
        env.reset(seed=seed)
        players = duel(env)._players
        assert [player.seen.variables["DEAD"] for player in players] == [0, 0]
        assert [player.gained("DEATHCOUNT") for player in players] == [0, 0] and duel(env)._tics == 0


def test_who_has_more_frags_than_every_other_player_has_won(match):
    env = match(limit=8)
    env.reset(seed=0)
    players = duel(env)._players
    frags = players[1].seen.variables["FRAGCOUNT"]  # where many begin in one place, one may have killed another already
    players[1]._first = players[1]._first._replace(variables=variables(FRAGCOUNT=frags - 3))
    env.step(np.zeros((2, 2), int))
    info = env.step(np.zeros((2, 2), int))[-1]
    assert info["true_objective"].tolist() == [0, 1]


def test_bots_are_players_whose_frags_count(match, monkeypatch):
    env = match(limit=8, bots=1)
    env.reset(seed=0)
    players = duel(env)._players
    assert "PLAYER3_FRAGCOUNT" in players[0].seen.variables
    frags = players[1].seen.variables["FRAGCOUNT"]  # where many begin in one place, one may have killed another already
    players[1]._first = players[1]._first._replace(variables=variables(FRAGCOUNT=frags - 3))
    monkeypatch.setattr(players[0], "of_bots", lambda: [3])
    env.step(np.zeros((2, 2), int))
    assert env.step(np.zeros((2, 2), int))[-1]["true_objective"].tolist() == [0, 0]


# The host of the match, and another one, without which the host waits for a minute.
@pytest.mark.parametrize("seat", [0, pytest.param(1, marks=pytest.mark.on_demand)])
def test_a_match_whose_game_dies_ends_for_all_and_is_started_again(match, capfd, seat):
    env = match(limit=2000)
    env.reset(seed=1)
    before = env.step(np.array([[1, 0], [0, 0]]))[0]["screen"].copy()
    victim = duel(env)._games[seat]._pid
    os.kill(victim, signal.SIGKILL)
    for _ in range(2):  # the other one may notice only in the next step
        after, reward, terminated, truncated, info = env.step(np.array([[1, 0], [0, 0]]))
        if truncated.any():
            break
    assert truncated.all() and not terminated.any() and not reward.any()
    assert (after["screen"] == before).all() and info["metrics"]["crashed"].tolist() == [1, 1]
    assert "is started again" in capfd.readouterr().err
    for _ in range(3):
        _, _, terminated, truncated, _ = env.step(np.array([[1, 0], [0, 0]]))
        assert not (terminated | truncated).any()
    games = games_of(os.environ[doom_game.OWNER].encode())
    assert len(games) == 2 and victim not in games


def test_matches_that_start_at_once_have_ports_of_their_own(monkeypatch):
    free = [doom_match.free_port() for _ in range(2)]
    ports = iter([free[0], free[0], free[0], free[1], free[0]])
    monkeypatch.setattr(doom_match, "free_port", lambda: next(ports))
    first, second = doom_match.reserve_port(), doom_match.reserve_port()
    assert [each.getsockname()[1] for each in (first, second)] == free
    first.close()
    with doom_match.reserve_port() as third:
        assert third.getsockname()[1] == free[0], "the end of a match gives it back"
    second.close()


def test_flags_of_images_are_refused_for_a_match(match):
    with pytest.raises(InputError, match="--grayscale is for one agent"):
        envs.make("Doom/DuelSmall-v0", 2, grayscale=True)
    with pytest.raises(InputError, match="3 columns for its 2 agents"):
        match(3)
