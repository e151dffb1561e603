"""VizDoom's scenarios with the actions and rewards of Sample Factory's paper (arXiv 2006.11751): `Doom/Battle-v0`.

An id's environment sees the screen, uint8 [72, 128, 3], and in the scenarios with fights `measurements`, float32 [23],
beside it. docs/doom.md lists the ids.
"""

import difflib
import math
import sys
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from beast.envs.doom_game import ARENA, SCREEN, Game, GameCrashed, Seen, vizdoom
from beast.errors import InputError

PREFIX = "Doom/"
TICS_PER_SECOND = 35
SLOTS = range(8)  # of weapons

# A head is a choice of the policy: of its options one is held in a step. An option is the buttons that it presses.
Option = dict[str, float]
Head = tuple[Option, ...]


def press(*buttons: str) -> Head:
    """Nothing, or one of these buttons."""
    return ({}, *({button: 1.0} for button in buttons))


def turns(largest: float, step: float) -> Head:
    """No turn, or one of these degrees a tic, to the left and then to the right."""
    degrees = [step * n for n in range(1, round(largest / step) + 1)]
    return ({}, *({"TURN_LEFT_RIGHT_DELTA": x} for x in (*(-x for x in degrees), *degrees)))


FORWARD, STRAFE = press("MOVE_FORWARD", "MOVE_BACKWARD"), press("MOVE_RIGHT", "MOVE_LEFT")
TURN, ATTACK = press("TURN_LEFT", "TURN_RIGHT"), press("ATTACK")
WEAPONS = press(*(f"SELECT_WEAPON{slot}" for slot in SLOTS if slot))
FIGHT = (FORWARD, STRAFE, WEAPONS, ATTACK, press("SPEED"), turns(12.5, 1.25))  # 6,048 actions
BATTLE = (FORWARD, STRAFE, ATTACK, press("SPEED"), turns(10, 2))  # 396

# What a unit more and a unit less of a variable is worth in fights; of weapons and ammunition times their slot's WORTH.
BOTS = {
    "FRAGCOUNT": (1, -1.5), "DEATHCOUNT": (-0.75, 0.75), "HITCOUNT": (0.01, -0.01), "DAMAGECOUNT": (0.003, -0.003),
    "HEALTH": (0.005, -0.003), "ARMOR": (0.005, -0.001), "WEAPON": (0.02, -0.01), "AMMO": (0.0002, -0.0001),
}  # fmt: skip
DUEL = BOTS | {
    "FRAGCOUNT": (1, -0.001), "DEATHCOUNT": (-1, 1), "HITCOUNT": (0, 0), "DAMAGECOUNT": (0.01, -0.01),
    "HEALTH": (0.01, -0.01),
}  # fmt: skip
WORTH = (1, 1, 1, 5, 5, 5, 10, 10)  # of the weapon in each slot
HELD = 0.0002  # reward of a step with a weapon in hand that has ammunition, times its worth
HELD_STEPS = 4  # before it counts as held
LARGEST = {"DAMAGECOUNT": 200, "HITCOUNT": 5}  # gain in one step
COUNTERS = ("FRAGCOUNT", "DEATHCOUNT", "HITCOUNT", "DAMAGECOUNT")  # which DOOM does not reset with every episode
SEEN = ("SELECTED_WEAPON", "SELECTED_WEAPON_AMMO", "HEALTH", "ARMOR", "USER2", "ATTACK_READY", "PLAYER_COUNT")
FIGHT_VARIABLES = (
    *SEEN, *(f"WEAPON{slot}" for slot in SLOTS), *(f"AMMO{slot}" for slot in SLOTS), *COUNTERS, "DEAD",
)  # fmt: skip
RULES = (  # of deathmatches; the clock here ends them before DOOM's does
    "-deathmatch +timelimit 10.0 +sv_forcerespawn 1 +sv_noautoaim 1 +sv_respawnprotect 1 +sv_spawnfarthest 1 "
    "+sv_nocrouch 1 +sv_nojump 1 +sv_nofreelook 1 +sv_noexit 1 +viz_respawn_delay 2 +viz_nocheat 0"
)


@dataclass(frozen=True)
class Scenario:
    """What an id plays."""

    wad: str
    heads: tuple[Head, ...]
    limit: int  # in tics, after which an episode is truncated
    config: str = ""
    rewards: tuple[float, float] | None = None  # of a living tic, and what death costs; None: those of the config
    scale: float = 1.0  # of the scenario's rewards
    healing: float = 0.0  # reward of a step in which health rises
    skill: int | None = None
    frames: int = 4  # tics of a step
    measured: bool = False  # shows measurements
    shaping: dict[str, tuple[float, float]] = field(default_factory=dict)
    held: float = HELD  # of a step with a weapon in hand, times its worth, where there is shaping
    bots: int = 0
    seats: int = 1  # players that are agents
    rules: str = ""  # arguments of the game, beside RULES
    objective: str = ""  # the variable that counts as success; "reward": the scenario's own reward, without shaping


BASIC: tuple[Head, ...] = (({}, {"MOVE_LEFT": 1.0}, {"MOVE_RIGHT": 1.0}, {"ATTACK": 1.0}),)
GATHERING = (press("TURN_LEFT", "TURN_RIGHT", "MOVE_FORWARD", "MOVE_BACKWARD"),)
IN_BATTLE = {"HEALTH": BOTS["HEALTH"]}
SCENARIOS = {
    "Basic": Scenario("basic.wad", BASIC, 300, "basic.cfg", scale=0.01),
    "DefendCenter": Scenario("defend_the_center.wad", (TURN, ATTACK), 2100, "defend_the_center.cfg"),
    "DefendLine": Scenario("defend_the_line.wad", (TURN, ATTACK), 10_500, "defend_the_line.cfg"),
    "HealthGathering": Scenario(
        "health_gathering.wad", GATHERING, 2100, "health_gathering.cfg", rewards=(0.01, 0), healing=1
    ),
    "HealthGatheringSupreme": Scenario(
        "health_gathering_supreme.wad", GATHERING, 2100, "health_gathering_supreme.cfg", rewards=(0.01, 0), healing=1
    ),
    "MyWayHome": Scenario("my_way_home.wad", (TURN, FORWARD), 2100, "my_way_home.cfg"),
    "DeadlyCorridor": Scenario(
        "deadly_corridor.wad", (TURN, FORWARD, STRAFE, ATTACK), 2100, "deadly_corridor.cfg", scale=0.01
    ),
    "TakeCover": Scenario("take_cover.wad", (press("MOVE_LEFT", "MOVE_RIGHT"),), 10_500, "take_cover.cfg"),
    "PredictPosition": Scenario("predict_position.wad", (TURN, ATTACK), 300, "predict_position.cfg"),
    "Battle": Scenario(
        "battle.wad", BATTLE, 2100, rewards=(0, 0), skill=2, measured=True, shaping=IN_BATTLE,
        objective="reward",
    ),
    "Battle2": Scenario(
        "battle2.wad", BATTLE, 2100, rewards=(0, 0), skill=2, measured=True, shaping=IN_BATTLE,
        objective="reward",
    ),
    "DuelBots": Scenario(
        "ssl2.wad", (*FIGHT, press("USE")), 8400, frames=2, measured=True, shaping=BOTS, bots=1,
        objective="FRAGCOUNT",
    ),
    "DeathmatchBots": Scenario(
        "dwango5.wad", FIGHT, 8400, frames=2, measured=True, shaping=BOTS, bots=7, objective="FRAGCOUNT"
    ),
    "Duel": Scenario("ssl2.wad", (*FIGHT, press("USE")), 8400, frames=2, measured=True, shaping=DUEL, seats=2),
    "Deathmatch": Scenario(
        "freedm.wad", (*FIGHT, press("USE")), 8400, frames=2, measured=True, shaping=DUEL, seats=4, bots=4
    ),
    # In a room of our own, with nothing to fetch. Players turn where they stand: if they could only step sideways, they
    # would be in line with each other at the same moments, and neither could gain. What one gains the other loses:
    # where a hit cost nothing, players earned more from each other, but not from others (docs/doom.md).
    "DuelSmall": Scenario(
        ARENA, (turns(2, 1), ATTACK), 2100, measured=True, seats=2, rules="+sv_infiniteammo 1",
        shaping={"FRAGCOUNT": (1, 0), "DEATHCOUNT": (-1, 0), "DAMAGECOUNT": (0.01, 0), "HEALTH": (0, -0.01)},
        held=0,
    ),
}  # fmt: skip


def scenario_of(env_id: str) -> Scenario:
    """Raises InputError, which lists the nearest ids, for one that there is not."""
    name = env_id.removeprefix(PREFIX).removesuffix("-v0")
    if not env_id.endswith("-v0") or name not in SCENARIOS:
        nearest = difflib.get_close_matches(name, SCENARIOS, n=3, cutoff=0.4) or list(SCENARIOS)
        ids = ", ".join(f"{PREFIX}{each}-v0" for each in nearest)
        raise InputError(f"no environment is called {env_id!r}: the nearest are {ids}")
    return SCENARIOS[name]


class Doom(gymnasium.Env):
    """A scenario for one player. A time limit truncates with the last frame; so does a game that crashes or hangs,
    which `info["metrics"]["crashed"]` counts, and which is started again.

    `reward_terms` has the coefficient of each part of the shaping, `info["reward_terms"]` the amounts.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}

    def __init__(self, env_id: str, frame_skip: int | None = None, scenarios: str = "", render_mode=None):
        """`scenarios` is a folder of WADs that VizDoom's package does not have. Raises MissingPackage, MissingFile."""
        scenario = self._scenario = scenario_of(env_id)
        self._id, self._frames = env_id, frame_skip or scenario.frames
        self.render_mode = render_mode
        fps = TICS_PER_SECOND / self._frames
        self.metadata = {**self.metadata, "render_fps": fps, "frames_per_step": self._frames}
        self._player = Player(scenario)
        self.action_space, self.observation_space = self._player.action_space, self._player.observation_space
        self.reward_terms = self._player.terms.coefficients
        self._game = make_game(scenario, scenarios, f"-host 1 {RULES} {scenario.rules}" if scenario.bots else "")
        self._game.start()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        bots = ["removebots", *["addbot"] * self._scenario.bots] if self._scenario.bots else []
        try:
            seen = self._begin(bots)
        except GameCrashed:
            self._game.restart()
            try:
                seen = self._begin(bots)
            except GameCrashed as error:
                raise InputError(f"{self._id}: the game does not start: {error}") from error
        self._tics = 0
        return self._player.begin(seen), {}

    def step(self, action):
        buttons = self._player.buttons(action)
        tics = min(self._frames, self._scenario.limit - self._tics)
        try:
            reward = self._game.act(buttons, tics)
            is_over, seen = self._game.is_over(), self._game.seen()
        except GameCrashed as error:
            print(f"{self._id}: a game has crashed and is started again: {error}", file=sys.stderr, flush=True)
            self._game.restart()
            return self._player.observation(), 0.0, False, True, self._player.final_info(crashed=1)
        self._tics += tics
        observation, reward, info = self._player.step(seen, reward, is_over)
        is_cut = self._tics >= self._scenario.limit and not is_over
        if is_over or is_cut:
            info |= self._player.final_info(crashed=0)
        return observation, reward, is_over, is_cut, info

    def render(self) -> np.ndarray:
        return self._player.seen.screen

    def close(self) -> None:
        self._game.close()

    def _begin(self, commands: list[str]) -> Seen:
        self._game.begin(int(self.np_random.integers(2**31)), commands)
        return self._game.seen()


def frags_of_bots(scenario: Scenario) -> list[str]:
    """The variables that have them: bots come after all seats, and leave with every episode."""
    return [f"PLAYER{scenario.seats + n}_FRAGCOUNT" for n in range(1, scenario.bots + 1)]


def make_game(scenario: Scenario, folder: str, arguments: str) -> Game:
    """A game that shows what a `Player` of the scenario needs."""
    buttons = dict.fromkeys(button for head in scenario.heads for option in head for button in option)
    variables = (*FIGHT_VARIABLES, *frags_of_bots(scenario)) if scenario.measured else ("HEALTH",)
    return Game(
        scenario.wad, scenario.config, buttons=buttons, variables=variables, folder=folder, skill=scenario.skill,
        rewards=scenario.rewards, arguments=arguments, hud=scenario.measured, crosshair=scenario.measured,
    )  # fmt: skip


class Player:
    """What one player of a scenario sees, does and earns, from what its game shows."""

    def __init__(self, scenario: Scenario):
        self._scenario = scenario
        sizes = [len(head) for head in scenario.heads]
        self.action_space = spaces.MultiDiscrete(sizes) if len(sizes) > 1 else spaces.Discrete(sizes[0])
        screen = spaces.Box(0, 255, SCREEN, np.uint8)
        self.observation_space: spaces.Space = screen
        if scenario.measured:
            measurements = spaces.Box(0, np.inf, (7 + 2 * len(SLOTS),), np.float32)
            self.observation_space = spaces.Dict({"screen": screen, "measurements": measurements})
        self._buttons = list(dict.fromkeys(button for head in scenario.heads for option in head for button in option))
        self.terms = Terms(scenario)
        rows, columns = (np.arange(n) * size // n for n, size in zip(SCREEN, (120, 160)))
        pixels = rows[:, None] * 160 + columns
        self._bytes = (pixels[..., None] * 3 + np.arange(3)).astype(np.intp)  # the nearest pixel of each

    def begin(self, seen: Seen):
        self._first = self.seen = seen
        self._own_reward = 0.0  # of the scenario, without shaping
        self.terms.begin()
        return self.observation()

    def buttons(self, action) -> list[float]:
        held: Option = {}
        for head, choice in zip(self._scenario.heads, np.atleast_1d(action)):
            held |= head[int(choice)]
        return [held.get(button, 0.0) for button in self._buttons]

    def step(self, seen: Seen, reward: float, is_over: bool) -> tuple[Any, float, dict]:
        """Observation, reward and info after a step in which the game gave `reward`."""
        risen = not is_over and seen.variables["HEALTH"] > self.seen.variables["HEALTH"]
        self.seen = seen
        reward = self._scenario.scale * reward + self._scenario.healing * risen
        self._own_reward += reward
        info: dict[str, Any] = {}
        if self.terms.coefficients:
            info["reward_terms"] = amounts = self.terms.step(seen.variables, is_over)
            reward += float(amounts @ np.fromiter(self.terms.coefficients.values(), np.float32))
        return self.observation(), reward, info

    def observation(self):
        screen = np.take(self.seen.screen.reshape(-1), self._bytes)
        if not self._scenario.measured:
            return screen
        now = self.seen.variables
        numbers = [
            now["SELECTED_WEAPON"], min(now["SELECTED_WEAPON_AMMO"] / 15, 5), now["HEALTH"] / 30, now["ARMOR"] / 30,
            now["USER2"] / 10, now["ATTACK_READY"], now["PLAYER_COUNT"] / 5, *(now[f"WEAPON{slot}"] for slot in SLOTS),
            *(min(now[f"AMMO{slot}"] / 15, 5) for slot in SLOTS),
        ]  # fmt: skip
        return {"screen": screen, "measurements": np.maximum(numbers, 0).astype(np.float32)}

    def final_info(self, crashed: int) -> dict:
        """What the last step of an episode tells. One that has crashed has no result."""
        info: dict[str, Any] = {"metrics": {"crashed": crashed}}
        if name := self._scenario.objective:
            score = self._own_reward if name == "reward" else self.gained(name)
            info |= {} if crashed else {"true_objective": score}
            info["metrics"] |= {"kills" if name == "reward" else name.lower(): score}
            if bots := self.of_bots():
                info["metrics"]["won"] = float(score > max(bots))
        return info

    def of_bots(self) -> list[float]:
        """The frags of each bot in this episode."""
        return [self.seen.variables[name] for name in frags_of_bots(self._scenario)]

    def gained(self, counter: str) -> float:
        """What a counter has gained in this episode."""
        return self.seen.variables[counter] - self._first.variables[counter]


class Terms:
    """The parts of a fight's shaping: what was gained and lost of each variable in a step, and a weapon in hand."""

    def __init__(self, scenario: Scenario):
        self.coefficients: dict[str, float] = {}
        self._variables = []
        for name, (gain, loss) in scenario.shaping.items():
            slots = SLOTS if name in ("WEAPON", "AMMO") else (None,)
            for slot in slots:
                variable, worth = (name, 1) if slot is None else (f"{name}{slot}", WORTH[slot])
                self._variables.append(variable)
                self.coefficients |= {f"{variable}+": gain * worth, f"{variable}-": loss * worth}
        if scenario.shaping and scenario.held:
            self.coefficients |= {f"HELD{slot}": scenario.held * WORTH[slot] for slot in SLOTS}

    def begin(self) -> None:
        self._before: dict[str, float] = {}
        self._weapons = [-1.0] * HELD_STEPS

    def step(self, now: dict[str, float], is_over: bool) -> np.ndarray:
        """The amount of each term, float32 [terms]: none in an episode's first step and at its end, nor where a dead
        player returns."""
        now = {**now, "HEALTH": max(now["HEALTH"], 0.0)}  # a million below zero for who stood where another one begins
        before, self._before = self._before, now
        amounts = dict.fromkeys(self.coefficients, 0.0)
        weapon = now["SELECTED_WEAPON"]
        is_held = weapon in SLOTS and self._weapons == [weapon] * HELD_STEPS and now["SELECTED_WEAPON_AMMO"] > 0
        self._weapons = [*self._weapons[1:], weapon]
        if is_over or not before or (before["DEAD"] and not now["DEAD"]):
            return np.zeros(len(amounts), np.float32)
        for name in self._variables:
            change = min(now[name] - before[name], LARGEST.get(name, math.inf))
            amounts[f"{name}+" if change > 0 else f"{name}-"] = abs(change)
        if is_held and (name := f"HELD{int(weapon)}") in amounts:
            amounts[name] = 1.0
        return np.fromiter(amounts.values(), np.float32)


def register_doom(env_id: str) -> None:
    """Register the scenario of this id with gymnasium. Raises InputError for one that there is not, MissingPackage
    without VizDoom."""
    scenario_of(env_id)
    vizdoom()
    if env_id not in gymnasium.registry:
        gymnasium.register(env_id, "beast.envs.doom:Doom", order_enforce=False, kwargs={"env_id": env_id})
