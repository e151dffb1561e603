// What the Python module's classes take from Python, checked.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "env.h"

namespace beast::atari {

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

inline Rom rom_of(const std::string& bytes, const std::string& game) {
  Rom rom{};
  if (!make_rom(rom, reinterpret_cast<const uint8_t*>(bytes.data()), static_cast<int>(bytes.size()), game.c_str())) {
    throw std::invalid_argument("the emulator does not know the game " + game + " with a ROM of " +
                                std::to_string(bytes.size()) + " bytes");
  }
  return rom;
}

inline void check(double value, double least, double most, const char* name) {
  if (least <= value && value <= most) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ": it must lie between " +
                              std::to_string(least) + " and " + std::to_string(most));
}

// Sizes of images are the Resizer's to check.
inline EnvSettings settings_of(const py::dict& given) {
  EnvSettings settings;
  const auto take = [&](const char* name, auto& value) {
    value = given[name].template cast<std::decay_t<decltype(value)>>();
  };
  take("frame_skip", settings.frame_skip);
  take("max_pool", settings.max_pool);
  take("stack", settings.stack);
  take("height", settings.height);
  take("width", settings.width);
  take("grayscale", settings.grayscale);
  take("keeps_rgb", settings.keeps_rgb);
  take("noop_max", settings.noop_max);
  take("fire_reset", settings.fire_reset);
  take("episodic_life", settings.episodic_life);
  take("life_loss_info", settings.life_loss_info);
  take("clip_rewards", settings.clip_rewards);
  take("same_step", settings.same_step);
  take("max_frames", settings.max_frames);
  take("sticky", settings.sticky);
  take("actions", settings.actions);
  check(settings.frame_skip, 1, 1e6, "frame_skip");
  check(settings.stack, 1, 1024, "stack");
  check(settings.noop_max, 0, 1e6, "noop_max");
  check(settings.max_frames, 1, kMostFrames, "max_frames");
  check(settings.sticky, 0, 1, "sticky");
  check(static_cast<double>(settings.actions.size()), 1, kNumActions, "the number of actions");
  for (const int action : settings.actions) check(action, 0, kNumActions - 1, "an action");
  return settings;
}

}  // namespace beast::atari
