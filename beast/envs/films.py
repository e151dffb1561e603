"""Films of games."""

import numpy as np
from gymnasium.vector import VectorEnv

from beast.errors import MissingPackage

GIF_FRAMES, GIF_SIDE = 300, 160  # at most; pixels


class Film:
    """Films a game of the first environment of a vector env into an .mp4 or a small .gif. Its render mode is rgb_array.

    Of a long game a .gif has every second frame, or every fourth, …."""

    def __init__(self, env: VectorEnv, path: str):
        """Raises MissingPackage without imageio, or for a .gif Pillow."""
        self._env, self._path, self._over = env, path, False
        self._fps = (env.metadata or {}).get("render_fps") or 30
        self._frames: list[np.ndarray] = []  # of a .gif
        self._count, self._every = 0, 1
        try:
            if path.endswith(".gif"):
                import PIL.Image  # noqa: F401
            else:
                import imageio.v2 as imageio
                import imageio_ffmpeg  # noqa: F401  imageio itself misses it only at the first frame

                self._writer = imageio.get_writer(path, fps=self._fps, macro_block_size=2)
        except ImportError as error:
            packages = "Pillow" if path.endswith(".gif") else "imageio imageio-ffmpeg"
            raise MissingPackage(f"a video needs {packages} ({error}): pip install {packages}") from error

    def add(self, row: dict) -> None:
        """Film the step that wrote this row. Does nothing after the end of the first game."""
        self._over = self._over or int(row["episode_step"][0]) == 0
        if self._over:
            return
        frame = self._env.render()[0]
        if self._path.endswith(".gif"):
            every = -(-max(frame.shape[:2]) // GIF_SIDE)
            self._frames += [frame[::every, ::every].copy()] if self._count % self._every == 0 else []
            self._count += 1
            if len(self._frames) == GIF_FRAMES:
                self._frames, self._every = self._frames[::2], 2 * self._every
            return
        zoom = -(-320 // min(frame.shape[:2]))  # small images are enlarged to at least 320 pixels
        frame = frame.repeat(zoom, axis=0).repeat(zoom, axis=1)
        self._writer.append_data(frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2])

    def close(self) -> None:
        """Finish the file. There is none of a game of one step that is reset in the same step."""
        if not self._path.endswith(".gif"):
            self._writer.close()
        elif self._frames:
            from PIL import Image

            first, *others = map(Image.fromarray, self._frames)
            milliseconds = max(int(1000 * self._every / self._fps), 20)
            first.save(self._path, save_all=True, append_images=others, duration=milliseconds, loop=0)
