"""A board game against random play: `line` stones in a row on a board of `side` x `side`, by default tic-tac-toe.

    python monobeast.py --preset discrete --env examples.board_game:BoardGame-v0 --total_steps 300000

A mask says which squares are empty. Without one (`--env_kwargs '{"has_mask": false}'`) an illegal move loses the game.
"""

import gymnasium
import numpy as np
from gymnasium import spaces


class BoardGame(gymnasium.Env):
    """Observes own and other stones; pays 1 for a win, -1 for a loss. Either side may begin."""

    def __init__(self, side: int = 3, line: int = 3, has_mask: bool = True):
        size, self.has_mask = side * side, has_mask
        steps = [(1, range(side), range(side - line + 1)), (side, range(side - line + 1), range(side))]
        steps += [(side + 1, range(side - line + 1), range(side - line + 1))]
        steps += [(side - 1, range(side - line + 1), range(line - 1, side))]
        self.lines = np.array(
            [[y * side + x + step * n for n in range(line)] for step, ys, xs in steps for y in ys for x in xs]
        )
        self.action_space = spaces.Discrete(size)
        self.observation_space = spaces.Box(0, 1, (2 * size,), np.float32)
        if has_mask:
            self.observation_space = spaces.Dict(
                {"board": self.observation_space, "action_mask": spaces.MultiBinary(size)}
            )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.board = np.zeros(self.action_space.n, np.int8)  # 1: own stone, -1: the other's
        if self.np_random.integers(2):
            self._play(-1, self.np_random.integers(len(self.board)))
        return self._observation(), {}

    def step(self, action):
        if self.board[action]:
            assert not self.has_mask, f"square {action} is taken"
            return self._observation(), -1.0, True, False, {}
        is_won = self._play(1, action)
        empty = np.flatnonzero(self.board == 0)
        is_lost = bool(not is_won and len(empty) and self._play(-1, self.np_random.choice(empty)))
        ends = is_won or is_lost or self.board.all()
        return self._observation(), float(is_won) - float(is_lost), bool(ends), False, {}

    def _play(self, stone: int, square: int) -> bool:
        """Whether the stone completes a line."""
        self.board[square] = stone
        return bool((self.board[self.lines] == stone).all(1).any())

    def _observation(self):
        board = np.concatenate([self.board == 1, self.board == -1]).astype(np.float32)
        return {"board": board, "action_mask": (self.board == 0).astype(np.int8)} if self.has_mask else board


gymnasium.register("BoardGame-v0", BoardGame)
