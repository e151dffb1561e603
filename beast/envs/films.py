"""Films of games."""

from gymnasium.vector import VectorEnv

from beast.errors import MissingPackage


class Film:
    """Films a game of the first environment of a vector env into an .mp4. Its render mode is rgb_array."""

    def __init__(self, env: VectorEnv, path: str):
        """Raises MissingPackage without imageio."""
        try:
            import imageio.v2 as imageio
            import imageio_ffmpeg  # noqa: F401  imageio itself misses it only at the first frame
        except ImportError as error:
            message = f"a video needs imageio and its ffmpeg ({error}): pip install imageio imageio-ffmpeg"
            raise MissingPackage(message) from error
        self._env = env
        fps = (env.metadata or {}).get("render_fps", 30)
        self._writer = imageio.get_writer(path, fps=fps, macro_block_size=2)
        self._over = False

    def add(self, row: dict) -> None:
        """Film the step that wrote this row. Does nothing after the end of the first game."""
        self._over = self._over or int(row["episode_step"][0]) == 0
        if self._over:
            return
        frame = self._env.render()[0]
        zoom = -(-320 // min(frame.shape[:2]))  # small images are enlarged to at least 320 pixels
        frame = frame.repeat(zoom, axis=0).repeat(zoom, axis=1)
        self._writer.append_data(frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2])

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()
