"""Frame skip, gray, scale and stack for images: of single environments, and of vector envs in color."""

from collections.abc import Callable

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import VectorEnv, VectorWrapper

from beast.envs.spaces import channels_first
from beast.errors import InputError, MissingPackage


def process_images(
    env: gymnasium.Env, *, env_id: str, frame_skip: int = 1, grayscale: bool = False, resize: int = 0,
    frame_stack: int = 1,
) -> gymnasium.Env:  # fmt: skip
    """The environment with its images [H, W], [H, W, C] or [C, H, W] processed by gymnasium's wrappers, in this order.

    `frame_skip` repeats an action and sees the maximum of the last two frames. A stack of images lies in the channels,
    the newest last. Raises InputError for observations that are no images or not of the kind that a step needs, and
    MissingPackage where gymnasium needs OpenCV.
    """
    space = env.observation_space
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3):
        names = ("frame_skip", frame_skip > 1), ("grayscale", grayscale), ("resize", resize), ("frame_stack", True)
        name = next(name for name, is_asked in names if is_asked)
        raise InputError(
            f"{name} is for images, and {env_id} observes {space}: leave --{name} out, or see whether the environment "
            "has an argument for it (--env_kwargs)"
        )
    try:
        if frame_skip > 1:
            env = SkipFrames(env, frame_skip)
        if grayscale:
            env = wrappers.GrayscaleObservation(env, keep_dim=True)
        if resize:
            if len(space.shape) == 3 and channels_first(space.shape):
                raise ValueError(f"images have their channels first: {space.shape}")
            channels = env.observation_space.shape[2:]
            env = wrappers.ResizeObservation(env, (resize, resize))
            env = _change_images(env, lambda image: image.reshape(resize, resize, *channels))
    except (ValueError, TypeError) as error:
        raise InputError(f"{env_id} observes {space}, which cannot be processed: {error}") from error
    except DependencyNotInstalled as error:
        raise MissingPackage(f"--resize {resize} needs OpenCV ({error}): pip install opencv-python-headless") from error
    if len(env.observation_space.shape) == 2:
        env = _change_images(env, lambda image: image[..., None])
    if frame_stack > 1:
        env = _change_images(wrappers.FrameStackObservation(env, frame_stack), join_channels)
    return env


def _change_images(env: gymnasium.Env, change: Callable) -> gymnasium.Env:
    return wrappers.TransformObservation(env, change, _changed(env.observation_space, change))


def _changed(space: spaces.Box, change: Callable) -> spaces.Box:
    return spaces.Box(change(space.low), change(space.high), dtype=space.dtype.type)


class SkipFrames(gymnasium.Wrapper):
    """Repeats each action for `frames` frames, sums their rewards, and observes the maximum of the last two. Those may
    be fewer at an episode's end, whose last frame gymnasium's MaxAndSkipObservation does not show."""

    def __init__(self, env: gymnasium.Env, frames: int):
        super().__init__(env)
        self._frames = frames

    def reset(self, **kwargs):
        self._newest, info = self.env.reset(**kwargs)
        return self._newest, info

    def step(self, action):
        total = 0.0
        for _ in range(self._frames):
            before = np.copy(self._newest)  # an environment may write into the one it gave
            self._newest, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return np.maximum(before, self._newest), total, terminated, truncated, info


def join_channels(images: np.ndarray) -> np.ndarray:
    """Stacks [..., n, H, W, C] or [..., n, C, H, W] as images [..., H, W, n*C] or [..., n*C, H, W], a copy."""
    *rest, n, first, second, third = images.shape
    if channels_first((first, second, third)):
        return images.reshape(*rest, n * first, second, third)
    return np.moveaxis(images, -4, -2).reshape(*rest, first, second, n * third)


class JoinChannels(VectorWrapper):
    """A vector env that observes stacks of images in color, [n, H, W, C], as images [H, W, n*C]."""

    def __init__(self, env: VectorEnv):
        super().__init__(env)
        self.single_observation_space = _changed(env.single_observation_space, join_channels)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, self.num_envs)

    def reset(self, *, seed=None, options=None):
        observations, info = self.env.reset(seed=seed, options=options)
        return join_channels(observations), info

    def step(self, actions):
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        if "final_obs" in info:
            info["final_obs"] = join_channels(info["final_obs"])
        return join_channels(observations), rewards, terminated, truncated, info
