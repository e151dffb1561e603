"""Films of games."""

from __future__ import annotations

from gymnasium.vector import VectorEnv

from beast.envs.atari import ATARI_FRAMES_PER_STEP
from beast.envs.by_id import is_atari, make
from beast.envs.spaces import env_actions
from beast.errors import MissingPackage


class Film:
    """Films a game into an .mp4: the environment itself if its render mode is rgb_array, else a twin of it.

    The twin has the same id and seed and takes the same actions, so it plays the same game, and Atari in color.
    """

    def __init__(self, env_id: str, env: VectorEnv, path: str, seed: int):
        """`env` is one environment that was, or will be, reset with `seed`. Raises MissingPackage without imageio."""
        try:
            import imageio.v2 as imageio
            import imageio_ffmpeg  # noqa: F401  imageio itself misses it only at the first frame
        except ImportError as error:
            message = f"a video needs imageio and its ffmpeg ({error}): pip install imageio imageio-ffmpeg"
            raise MissingPackage(message) from error
        self._env, self._twin, self._is_atari = env, None, is_atari(env_id)
        if self._is_atari or getattr(env, "render_mode", None) != "rgb_array":
            in_color = {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}
            self._twin = make(env_id, 1, **(in_color if self._is_atari else {"render_mode": "rgb_array"}))
            self._env, (self._observations, _) = self._twin, self._twin.reset(seed=seed)
        fps = 60 / ATARI_FRAMES_PER_STEP if self._is_atari else (env.metadata or {}).get("render_fps", 30)
        self._writer = imageio.get_writer(path, fps=fps, macro_block_size=2)
        self._over = False

    def add(self, row: dict) -> None:
        """Film the step that wrote this row. Does nothing after the end of the first game."""
        if self._twin is not None and not self._over:
            actions = env_actions(self._twin.single_action_space, row["action"])
            self._observations = self._twin.step(actions)[0]
        self._over = self._over or int(row["episode_step"][0]) == 0
        if not self._over:
            frame = self._observations[0, -1] if self._is_atari else self._env.render()[0]
            zoom = -(-320 // min(frame.shape[:2]))  # small images are enlarged to at least 320 pixels
            frame = frame.repeat(zoom, axis=0).repeat(zoom, axis=1)
            self._writer.append_data(frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2])

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()
        if self._twin is not None:
            self._twin.close()
