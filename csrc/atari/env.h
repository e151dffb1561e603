// One environment: frame skip, no-ops and FIRE at the start, the maximum of two frames, scaling, stack, ends of
// episodes. What ale_py.vector_env.AtariVectorEnv does, as measured; tests/test_atari_env.py compares the two.
// protocol.h says what a step is and which of its frames are drawn.
// - Where a frame of a step ends early, `play_step` takes the environment back to `scratch.before` and plays the step
//   again, drawing all frames. `start_game` does the same with the frames of a reset.
// - An episode's last frame is never shown. Where it is the last frame of its step, the image is the maximum of the
//   frame before it and the newest image. Nothing else needs that image at its full size (34 KB and more), so no
//   environment keeps it. It keeps `before`, its state before the step or the start that made the newest image, and
//   that step's action or that start's number of frames. `draw_again` plays the step or the start again, which draws
//   the same image: the state contains all generators.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "protocol.h"
#include "resize.h"

namespace beast::atari {

constexpr int kMostFrames = 1'000'000'000;  // of an episode

struct EnvSettings : Settings {
  bool grayscale = true;
  bool keeps_rgb = false;    // keep the newest image in color, too
  int noop_max = 30;         // an episode begins with fewer no-ops than this; 0 and 1: none
  bool fire_reset = true;    // and with FIRE where the game has it
  double sticky = 0;         // probability with which a frame repeats the action of the one before
  std::vector<int> actions;  // what an index of an action means, 0 to 17
};

struct Palette {
  uint8_t rgb[256][3] = {};
  uint8_t gray[256] = {};
};

// What one environment is, beside its images. Trivially copyable: it travels as bytes.
struct EnvState {
  Vcs vcs;
  Generators generators;
  uint32_t noop_seed;  // the generator of no-ops is MT19937(noop_seed) after noop_draws draws, one per episode
  uint32_t noop_draws;
  Progress progress;
  int32_t oldest;        // place in the stack of its oldest image
  int32_t start_frames;  // -1: a step made the newest image; else a start with so many frames did
  int32_t action;        // of that step
  uint8_t has_ended;     // NEXT_STEP: the next step begins a new episode
  uint8_t was_reset;     // there is an episode
};
static_assert(std::is_trivially_copyable<EnvState>::value, "states are copied as bytes");

// One environment's memory. Few steps need the newest image at full size. It is not kept: they draw it again from
// `before`, which is smaller.
struct Env {
  EnvState* state;
  EnvState* before;  // as it was before the step or the start that made the newest image
  uint8_t* rgb;     // [rows, 160, 3]: that image in color, where it is kept
  uint8_t* stack;    // [stack, height, width(, 3)], a ring
};

// FNV-1a, eight bytes at a time.
inline uint64_t hash(const void* data, size_t size, uint64_t value = 0xCBF29CE484222325) {
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  for (; size >= 8; size -= 8, bytes += 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    value = (value ^ word) * 0x100000001B3;
    value ^= value >> 32;
  }
  for (; size; --size, ++bytes) value = (value ^ *bytes) * 0x100000001B3;
  return value;
}

// A game and its settings: what all environments of a pool share. Nothing in it changes once it is made.
class Protocol {
 public:
  // What one thread needs while it steps.
  struct Scratch {
    std::vector<uint8_t> frames[2];  // as the core renders them: [0] a step's last frame but one, [1] its last
    std::vector<uint8_t> set_aside;  // frames[0] while an image is drawn again
    std::vector<uint8_t> image;      // [rows, 160(, 3)]: what an environment shows, before it is scaled
    EnvState before{};               // the environment before this step
    Resizer::Scratch resize;
  };

  // Loads the ROM once: only Double Dunk's load with sticky actions depends on the seed. All others begin with a copy.
  // The protocol refers to the ROM, which has to outlive it.
  Protocol(const Rom& rom, EnvSettings settings, const Palette& palette)
      : rom_(rom),
        settings_(std::move(settings)),
        palette_(palette),
        channels_(settings_.grayscale ? 1 : 3),
        draws_indices_(!settings_.grayscale || settings_.keeps_rgb || rom.game.has(kPal)),
        num_pixels_(kScreenWidth * rom.game.height),
        resize_(rom.game.height, kScreenWidth, settings_.height, settings_.width, channels_) {
    for (int i = 0; i < 256; ++i) {
      colors_[i] = 0;
      std::memcpy(&colors_[i], palette_.rgb[i], 3);
    }
    const std::vector<int>& actions = settings_.actions;
    has_fire_ = std::find(actions.begin(), actions.end(), kFire) != actions.end();
    // Some games' resets draw from the user's generator, always the same number of times.
    const auto count_draws = [](const Generators& generators) {
      Mt19937 generator;
      generator.seed(0);
      int draws = 0;
      while (std::memcmp(&generator, &generators.user, sizeof(generator)) && draws < 100'000) {
        generator.draw();
        ++draws;
      }
      return draws;
    };
    loaded_ = EnvState{};
    load(rom_, loaded_.vcs, loaded_.generators, 0, NoOutput{});
    loaded_draws_ = count_draws(loaded_.generators);
    first_ = loaded_;
    first_rgb_.resize(rgb_bytes());
    Scratch scratch = make_scratch();
    start_game_seeing_all(first_, 0, first_rgb_.data(), scratch);
    first_image_ = scratch.image;
    first_draws_ = count_draws(first_.generators) - loaded_draws_;
  }

  const EnvSettings& settings() const { return settings_; }
  size_t image_bytes() const { return static_cast<size_t>(num_pixels_) * channels_; }
  size_t rgb_bytes() const { return settings_.keeps_rgb ? static_cast<size_t>(num_pixels_) * 3 : 0; }
  size_t plane_bytes() const { return static_cast<size_t>(settings_.height) * settings_.width * channels_; }
  size_t stack_bytes() const { return plane_bytes() * settings_.stack; }
  int rows() const { return num_pixels_ / kScreenWidth; }
  bool draws_indices() const { return draws_indices_; }
  const Resizer& resizer() const { return resize_; }
  bool fires() const { return settings_.fire_reset && has_fire_; }
  // Whether sticky actions change how long the game's menu takes.
  bool load_depends_on_seed() const { return rom_.game.rules == kDoubleDunk && sticky() > 0; }
  // The state after the load, where it does not depend on the seed.
  const EnvState& loaded() const { return loaded_; }
  // How often a reset of the game draws from the user's generator.
  int draws_of_reset() const { return first_draws_; }

  // The user's generator where the first episode begins, after so many start frames.
  Mt19937 user_generator(uint32_t seed, int num_start_frames) const {
    Mt19937 generator;
    generator.seed(seed);
    skip(generator, loaded_draws_ + first_draws_ + num_start_frames * Mt19937::kDrawsPerFrame);
    return generator;
  }

  // The number of frames between the game's reset and the first observation. `noops`: the generator of no-ops.
  int draw_start_frames(Mt19937& noops, uint32_t* draws = nullptr) const {
    uint32_t drawn = 0;
    const int count = settings_.noop_max > 1 ? draw_noops(noops, settings_.noop_max, drawn) : 0;
    if (draws) *draws += drawn;
    return start_frames(fires(), count);
  }

  Scratch make_scratch() const {
    Scratch scratch;
    for (std::vector<uint8_t>& frame : scratch.frames) frame.resize(num_pixels_);
    scratch.set_aside.resize(num_pixels_);
    scratch.image.resize(image_bytes());
    scratch.resize = resize_.scratch();
    return scratch;
  }

  // Begins an episode as if the ROM had been loaded with this seed, which also seeds the no-ops.
  StepResult reset(const Env& env, uint32_t seed, Scratch& scratch) const {
    *env.state = loaded_;
    if (load_depends_on_seed()) {
      load(rom_, env.state->vcs, env.state->generators, seed, NoOutput{}, sticky());
    } else {
      env.state->generators.user.seed(seed);
      skip(env.state->generators.user, loaded_draws_);
    }
    env.state->noop_seed = seed;
    env.state->was_reset = true;
    start_game(env, !load_depends_on_seed(), scratch);
    return begin_episode(env, scratch);
  }

  // Begins an episode; all generators go on.
  StepResult reset(const Env& env, Scratch& scratch) const {
    start_game(env, false, scratch);
    return begin_episode(env, scratch);
  }

  // One step with the action of this index. `final_observation` is null, or memory for the last observation of an
  // episode that ends in this step under SAME_STEP.
  StepResult step(const Env& env, int action, uint8_t* final_observation, Scratch& scratch) const {
    EnvState& state = *env.state;
    if (state.has_ended) return reset(env, scratch);  // NEXT_STEP: the action is void
    scratch.before = state;
    const int meaning = settings_.actions[action];
    int shown;
    StepResult result = play_step(state, meaning, scratch, shown);
    const bool has_ended = end_step(settings_, scratch.before.progress.lives, state.progress, result);
    // An episode's last frame is never shown: see the file's head.
    if (shown & kLast) {
      show_frames(shown, env.rgb, scratch);
      push(env, scratch);
    } else if (shown & kLastButOne) {
      draw_again(env, scratch);
      show(scratch.frames[0], true, env.rgb, scratch.image);
      push(env, scratch);
    } else {
      push_newest(env);
    }
    *env.before = scratch.before;
    state.action = meaning;
    state.start_frames = -1;
    add_info(state.vcs, state.progress, result);
    if (final_observation && (has_ended || result.terminated)) observe(env, final_observation);
    if (has_ended) {
      if (settings_.same_step) {
        const StepResult first = reset(env, scratch);
        result.lives = first.lives;
        result.frame_number = first.frame_number;
        result.error = first.error;
        result.episode_frame_number = first.episode_frame_number;
      } else {
        state.has_ended = true;
      }
    }
    return result;
  }

  // The infos of a state, without a step.
  StepResult info(const EnvState& state) const {
    StepResult result;
    add_info(state.vcs, state.progress, result);
    return result;
  }

  // Two protocols with equal fingerprints understand each other's states.
  uint64_t fingerprint() const {
    const EnvSettings& s = settings_;
    const int64_t numbers[] = {s.frame_skip,    s.max_pool,       s.stack,        s.height,    s.width,
                               s.grayscale,     s.keeps_rgb,     s.noop_max,     s.fire_reset, s.episodic_life,
                               s.life_loss_info, s.clip_rewards,  s.same_step,    s.max_frames,
                               static_cast<int64_t>(sticky()),    static_cast<int64_t>(sizeof(EnvState))};
    uint64_t value = hash(numbers, sizeof(numbers));
    value = hash(s.actions.data(), s.actions.size() * sizeof(int), value);
    return hash(rom_.bytes, sizeof(rom_.bytes), value);
  }

  // Copies the stack, the oldest image first.
  void observe(const Env& env, uint8_t* observation) const {
    const size_t oldest = env.state->oldest * plane_bytes();
    std::memcpy(observation, env.stack + oldest, stack_bytes() - oldest);
    std::memcpy(observation + stack_bytes() - oldest, env.stack, oldest);
  }

 private:
  static void skip(Mt19937& generator, int draws) {
    for (int k = 0; k < draws; ++k) generator.draw();
  }

  // Resets the game, plays the start frames and leaves what the last of them shows in scratch.image. `is_first`: it is
  // the reset behind a load, which is known already.
  void start_game(const Env& env, bool is_first, Scratch& scratch) const {
    EnvState& state = *env.state;
    Mt19937 noops;
    if (settings_.noop_max > 1) {
      noops.seed(state.noop_seed);
      skip(noops, static_cast<int>(state.noop_draws));
    }
    const int start_frames = state.start_frames = draw_start_frames(noops, &state.noop_draws);
    *env.before = state;
    if (is_first) {
      state.vcs = first_.vcs;
      state.generators.system = first_.generators.system;
      skip(state.generators.user, first_draws_);
    } else if (start_frames) {
      reset_game(rom_, state.vcs, state.generators, NoOutput{}, sticky());
    }
    if (start_frames) {
      for (int k = 0; k < start_frames - 1; ++k) frame(state, start_action(fires(), k), NoOutput{});
      // The last frame is enough where all of its rows are drawn. In a few games it ends early: then the others have to
      // be drawn, too.
      const Canvas canvas = {scratch.frames[1].data(), rows(), !draws_indices_};
      mark_rows(canvas);
      frame(state, start_action(fires(), start_frames - 1), ScreenOutput{canvas});
      if (clear_marked_rows(canvas)) {
        show(scratch.frames[1], false, env.rgb, scratch.image);
      } else {
        state = *env.before;
        start_game_seeing_all(state, start_frames, env.rgb, scratch);
      }
    } else if (is_first) {
      std::memcpy(scratch.image.data(), first_image_.data(), image_bytes());
      std::copy_n(first_rgb_.data(), rgb_bytes(), env.rgb);
    } else {
      start_game_seeing_all(state, 0, env.rgb, scratch);
    }
  }

  void start_game_seeing_all(EnvState& state, int start_frames, uint8_t* rgb, Scratch& scratch) const {
    int current = 0;
    const AlternatingOutput output = {
        {scratch.frames[0].data(), scratch.frames[1].data()}, rows(), !draws_indices_, &current};
    for (std::vector<uint8_t>& pixels : scratch.frames) std::fill(pixels.begin(), pixels.end(), 0);
    reset_game(rom_, state.vcs, state.generators, output, sticky());
    for (int k = 0; k < start_frames; ++k) frame(state, start_action(fires(), k), output);
    show(scratch.frames[current], false, rgb, scratch.image);
  }

  StepResult begin_episode(const Env& env, Scratch& scratch) const {
    EnvState& state = *env.state;
    atari::begin_episode(state.vcs, state.progress);
    state.oldest = 0;
    state.has_ended = false;
    std::memset(env.stack, 0, stack_bytes());
    push(env, scratch);
    return info(state);
  }

  // Emulates a frame and returns its reward.
  template <class Output>
  int frame(EnvState& state, int action, const Output& output) const {
    return act(rom_, state.vcs, state.generators.user, action, sticky(), output);
  }

  // Plays a step of an environment that was as `scratch.before`.
  StepResult play_step(EnvState& state, int action, Scratch& scratch, int& shown) const {
    const Screens screens = {{scratch.frames[0].data(), scratch.frames[1].data()}, !draws_indices_, kAllLanes};
    StepResult result;
    const auto play = [&](bool sees_all) {
      return atari::play(rom_, settings_, sticky(), action, sees_all, screens, state.vcs, state.generators.user,
                         state.progress, result, shown);
    };
    if (!play(false) && needs_all_frames(settings_)) {
      state = scratch.before;
      play(true);
    }
    return result;
  }

  // Draws the newest image once more, into scratch.image. Playing uses scratch.before and frames[0]: they are put back.
  void draw_again(const Env& env, Scratch& scratch) const {
    const EnvState before = scratch.before;
    scratch.set_aside.swap(scratch.frames[0]);
    EnvState state = scratch.before = *env.before;
    if (env.state->start_frames >= 0) {
      start_game_seeing_all(state, env.state->start_frames, nullptr, scratch);
    } else {
      int shown;
      play_step(state, env.state->action, scratch, shown);
      show_frames(shown, nullptr, scratch);
    }
    scratch.set_aside.swap(scratch.frames[0]);
    scratch.before = before;
  }

  // Makes a frame the image, or takes the maximum of both; the same with the image in color, if there is a `rgb`. Where
  // the core renders gray levels the two may be swapped: `frame` then holds what was the image.
  void show(std::vector<uint8_t>& frame, bool is_maximum, uint8_t* rgb, std::vector<uint8_t>& shown) const {
    if (!draws_indices_) {
      if (is_maximum) {
        take_maximum(shown.data(), frame.data(), num_pixels_);
      } else {
        shown.swap(frame);
      }
      return;
    }
    if (!settings_.keeps_rgb) rgb = nullptr;
    const auto put = [is_maximum](uint8_t* row, const uint8_t* pixels, int size) {
      if (is_maximum) {
        take_maximum(row, pixels, size);
      } else {
        std::memcpy(row, pixels, size);
      }
    };
    uint8_t gray[kScreenWidth], color[3 * kScreenWidth + 1];  // a color is written with a byte behind it
    for (int begin = 0; begin < num_pixels_; begin += kScreenWidth) {
      const uint8_t* const row = frame.data() + begin;
      // Many rows are equal to the one above.
      if (begin == 0 || std::memcmp(row, row - kScreenWidth, kScreenWidth)) {
        for (int x = 0; x < kScreenWidth; ++x) {
          std::memcpy(color + 3 * x, &colors_[row[x]], 4);
          gray[x] = palette_.gray[row[x]];
        }
      }
      if (rgb) put(rgb + 3 * begin, color, 3 * kScreenWidth);
      if (channels_ == 3) {
        put(shown.data() + 3 * begin, color, 3 * kScreenWidth);
      } else {
        put(shown.data() + begin, gray, kScreenWidth);
      }
    }
  }

  // What a step shows whose last frame is seen.
  void show_frames(int shown, uint8_t* rgb, Scratch& scratch) const {
    show(scratch.frames[1], false, rgb, scratch.image);
    if (shown & kLastButOne) show(scratch.frames[0], true, rgb, scratch.image);
  }

  static void take_maximum(uint8_t* __restrict image, const uint8_t* __restrict other, int size) {
    for (int i = 0; i < size; ++i) image[i] = image[i] > other[i] ? image[i] : other[i];
  }

  // Scales the image into the place of the oldest one in the stack.
  void push(const Env& env, Scratch& scratch) const {
    resize_(scratch.image.data(), env.stack + env.state->oldest * plane_bytes(), scratch.resize);
    env.state->oldest = (env.state->oldest + 1) % settings_.stack;
  }

  // Repeats the stack's newest image in the place of its oldest.
  void push_newest(const Env& env) const {
    const int oldest = env.state->oldest, newest = (oldest + settings_.stack - 1) % settings_.stack;
    std::memmove(env.stack + oldest * plane_bytes(), env.stack + newest * plane_bytes(), plane_bytes());
    env.state->oldest = (oldest + 1) % settings_.stack;
  }

  uint64_t sticky() const { return sticky_draws(settings_.sticky); }

  const Rom& rom_;  // its owner outlives the protocol
  const EnvSettings settings_;
  const Palette palette_;
  uint32_t colors_[256];  // of the palette: red, green and blue, and a byte without meaning
  const int channels_;
  const bool draws_indices_;  // the core draws indices of the palette, not gray levels: it has those of NTSC only
  const int num_pixels_;
  const Resizer resize_;
  bool has_fire_ = false;
  EnvState loaded_;  // after the load
  EnvState first_;   // after the reset that follows it
  int loaded_draws_ = 0, first_draws_ = 0;  // of the user's generator until then
  std::vector<uint8_t> first_image_, first_rgb_;
};

}  // namespace beast::atari
