// Many environments of one game on a GPU: its kernels, as functions of a thread's number. batch.cu launches them,
// batch_host.h runs them on a CPU.
//
// A step is emulate, emulate with `is_again`, observe; a reset is begin, observe. All are launched always, so that the
// host never waits for what one before it has found. A warp emulates a console per lane. With fewer `lanes` than 32 a
// warp has fewer different opcodes to execute, and there are more warps.
#pragma once

#include <stddef.h>

#include "area.h"
#include "protocol.h"

namespace beast::atari {

constexpr int kWarpSize = 32;
constexpr int kNoSuchAction = kEndlessReset + 1;  // among errors, behind those of Error: the step was played with NOOP

// 8 bytes, where an MT19937 has 2.5 KB, but other draws than ALE's. Steele, Lea and Flood 2014.
struct SplitMix64 {
  static constexpr int kDrawsPerFrame = 1;

  uint64_t state;

  HD uint32_t draw() {
    uint64_t x = state += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return static_cast<uint32_t>((x ^ x >> 31) >> 32);
  }
};

// What episodes begin with: states that a CPU has made (starts.h), because a reset takes 70 frames and more.
struct Starts {
  const Vcs* states;      // [rows of the table, num_lengths]
  const uint8_t* images;  // [rows of the table, num_lengths, rows of the screen, 160]
  // A console's reset behind the load is its reset 0. Behind the last it goes on with reset 1.
  const uint8_t* rows;     // [num_resets]: which row of the table
  const uint8_t* lengths;  // [num_resets, count]: start frames
  int32_t num_lengths, num_resets;
  int32_t draws;  // of a console's generator in a reset, before its start frames
};

// What a reset does with a console: nothing, a reset of its game, or one behind a load with the generator that the host
// has made.
enum Begins : uint8_t { kGoesOn, kBegins, kBeginsAnew };

// What `observe` makes a console's stack of.
struct Picture {
  int32_t image_start;  // the newest image from before this step is that of this start; -1: it is in Batch::images
  int32_t start;        // an episode begins with this start; -1: none does
  uint8_t has_step;     // a step was played, before that
  uint8_t shown;        // its frames, as in Shown
  uint8_t is_final;     // it has a last observation of an episode, or of a life
};

// What all kernels get, by value. Arrays are [count, …] in the GPU's memory; [count] where nothing else is said.
struct Batch {
  const Rom* rom;
  Starts starts;
  Settings settings;
  AreaMean mean;
  AreaAxis rows, columns;
  uint64_t sticky;  // as for `act`
  int32_t count, lanes, num_actions;
  uint8_t meanings[kNumActions];  // of an action's index

  Vcs* vcs;
  Progress* progress;
  uint8_t* generators;    // of the kernels' type
  uint32_t* resets;       // since the load
  const uint8_t* begins;  // which of them `begin` resets: see Begins
  bool* has_ended;        // NEXT_STEP: the next step begins a new episode
  Picture* pictures;
  Vcs* vcs_before;  // the newest step's beginning
  Progress* progress_before;
  uint8_t* generators_before;  // written where there are sticky actions
  uint8_t* screens;            // [count, 2, rows, 160]: a step's last frame but one, its last
  uint8_t* images;             // [count, rows, 160]: the newest image, where a step made it
  int32_t *again, *num_again;  // the consoles that have to be drawn once more; num_again: one number, 0 between steps

  const int64_t* actions;
  uint8_t* stacks;        // [count, stack, height, width]: observations, the oldest image first
  uint8_t* final_stacks;  // the same of episodes that end, under SAME_STEP; else null
  float* rewards;
  int32_t *lives, *frame_numbers, *episode_frame_numbers;
  int32_t* errors;  // kNoSuchAction stays until a reset, so that it is seen
  bool *terminated, *truncated;
};

HD inline int num_warps(const Batch& batch) { return (batch.count + batch.lanes - 1) / batch.lanes; }

// The console of a thread of emulate or begin; -1: it has none.
HD inline int console_of(const Batch& batch, int thread) {
  const int lane = thread % kWarpSize, console = thread / kWarpSize * batch.lanes + lane;
  return lane < batch.lanes && console < batch.count ? console : -1;
}

template <class Generator>
HD Generator& generator_of(uint8_t* generators, int console) {
  return reinterpret_cast<Generator*>(generators)[console];
}

HD inline size_t screen_bytes(const Batch& batch) { return static_cast<size_t>(batch.rom->game.height) * kScreenWidth; }

HD inline Screens screens_of(const Batch& batch, int console, Lanes lanes) {
  uint8_t* const first = batch.screens + 2 * console * screen_bytes(batch);
  return {{first, first + screen_bytes(batch)}, true, lanes};
}

// What the action of a console does in this step. One that there is not does nothing.
HD inline bool has_action(const Batch& batch, int console) {
  return batch.actions[console] >= 0 && batch.actions[console] < batch.num_actions;
}
HD inline int meaning_of(const Batch& batch, int console) {
  return has_action(batch, console) ? batch.meanings[batch.actions[console]] : kNoop;
}

HD inline void write_results(const Batch& batch, int console, const StepResult& result, int error) {
  batch.rewards[console] = static_cast<float>(result.reward);
  batch.terminated[console] = result.terminated;
  batch.truncated[console] = result.truncated;
  batch.lives[console] = result.lives;
  batch.frame_numbers[console] = result.frame_number;
  batch.episode_frame_numbers[console] = result.episode_frame_number;
  if (batch.errors[console] != kNoSuchAction) batch.errors[console] = error;
}

// Where the newest image lies once the step or start that made it is over: see Picture::image_start.
HD inline int place_of_image(const Picture& picture) {
  return picture.start >= 0 ? picture.start : picture.shown & kLast ? -1 : picture.image_start;
}

// Puts a start in place. `is_first`: behind a load.
template <class Generator>
HD void start_episode(const Batch& batch, int console, bool is_first) {
  const Starts& starts = batch.starts;
  uint32_t& resets = batch.resets[console];
  resets = is_first ? 0 : resets + 1;
  const int reset = resets ? 1 + static_cast<int>((resets - 1) % (starts.num_resets - 1)) : 0;
  const int length = starts.lengths[static_cast<size_t>(reset) * batch.count + console];
  const int start = starts.rows[reset] * starts.num_lengths + length;
  Vcs& vcs = batch.vcs[console];
  const uint32_t frame_number = is_first ? 0 : vcs.frame_number;
  vcs = starts.states[start];
  vcs.frame_number += frame_number;
  if (!is_first && batch.sticky) {
    Generator& generator = generator_of<Generator>(batch.generators, console);
    for (int i = 0; i < starts.draws + length * Generator::kDrawsPerFrame; ++i) generator.draw();
  }
  begin_episode(vcs, batch.progress[console]);
  batch.has_ended[console] = false;
  batch.pictures[console].start = start;
}

// A reset of some consoles. The others keep what they show.
template <class Generator>
HD void begin(const Batch& batch, int thread) {
  const int console = console_of(batch, thread);
  if (console < 0) return;
  Picture& picture = batch.pictures[console];
  picture = {place_of_image(picture), -1, false, 0, false};
  if (batch.begins[console] == kGoesOn) return;
  start_episode<Generator>(batch, console, batch.begins[console] == kBeginsAnew);
  batch.errors[console] = kNoError;
  StepResult result;
  add_info(batch.vcs[console], batch.progress[console], result);
  write_results(batch, console, result, result.error);
}

// The frames of a step, in warps of batch.lanes consoles. A console whose episode ended in the step before begins anew.
// `is_again`: draws the steps of the list `again`, in which a frame ended early, once more with all their frames. Their
// states and results stand.
template <class Generator>
HD void emulate(const Batch& batch, int thread, bool is_again) {
  const int console = !is_again ? console_of(batch, thread) : thread < *batch.num_again ? batch.again[thread] : -1;
  const bool plays = console >= 0 && (is_again || !batch.has_ended[console]);
  const Lanes lanes = lanes_where(kAllLanes, plays);
  if (console < 0) return;
  Picture& picture = batch.pictures[console];
  if (!is_again) picture = {place_of_image(picture), -1, plays, 0, false};
  StepResult result;
  int error = kNoError;
  if (plays) {
    const Settings& settings = batch.settings;
    Generator& generator = generator_of<Generator>(is_again ? batch.generators_before : batch.generators, console);
    Vcs vcs = (is_again ? batch.vcs_before : batch.vcs)[console];
    Progress progress = (is_again ? batch.progress_before : batch.progress)[console];
    const int lives_before = progress.lives;
    if (!is_again) {
      batch.vcs_before[console] = vcs;
      batch.progress_before[console] = progress;
      if (batch.sticky) generator_of<Generator>(batch.generators_before, console) = generator;
    }
    int shown;
    const bool is_whole = play(*batch.rom, settings, batch.sticky, meaning_of(batch, console), is_again,
                               screens_of(batch, console, lanes), vcs, generator, progress, result, shown);
    if (is_again) return;
    if (!is_whole && needs_all_frames(settings)) batch.again[count_up(batch.num_again)] = console;
    const bool has_ended = end_step(settings, lives_before, progress, result);
    error = vcs.error || has_action(batch, console) ? vcs.error : kNoSuchAction;
    picture.shown = static_cast<uint8_t>(shown);
    picture.is_final = has_ended || result.terminated;
    batch.vcs[console] = vcs;
    batch.progress[console] = progress;
    batch.has_ended[console] = has_ended;
  }
  if (!plays || (batch.has_ended[console] && batch.settings.same_step)) {
    start_episode<Generator>(batch, console, false);
    if (error != kNoSuchAction) error = batch.vcs[console].error;
  }
  add_info(batch.vcs[console], batch.progress[console], result);
  write_results(batch, console, result, error);
}

// One pixel of all images of a console's stack. It touches no pixel of another thread's: the order of threads is free.
HD inline void observe(const Batch& batch, int console, int pixel) {
  const Settings& settings = batch.settings;
  const Picture& picture = batch.pictures[console];
  const size_t plane = static_cast<size_t>(settings.height) * settings.width, size = screen_bytes(batch);
  uint8_t* const stack = batch.stacks + console * settings.stack * plane + pixel;
  uint8_t& newest = stack[(settings.stack - 1) * plane];
  const auto scale_maximum = [&](const uint8_t* image, const uint8_t* other) {
    newest = area_pixel(batch.mean, batch.rows, batch.columns, pixel / settings.width, pixel % settings.width,
                        [=](int y, int x) -> uint32_t {
                          const int at = y * kScreenWidth + x;
                          return image[at] > other[at] ? image[at] : other[at];
                        });
  };
  const auto image_of_start = [&](int start) { return batch.starts.images + start * size; };
  if (picture.has_step) {
    for (int i = 0; i < settings.stack - 1; ++i) stack[i * plane] = stack[(i + 1) * plane];
    const uint8_t* const last_but_one = batch.screens + 2 * console * size;
    const uint8_t* const last = last_but_one + size;
    uint8_t* const image = batch.images + console * size;
    if (picture.shown & kLast) {
      const uint8_t* const other = picture.shown & kLastButOne ? last_but_one : last;
      scale_maximum(last, other);
      for (size_t i = pixel; i < size; i += plane) image[i] = last[i] > other[i] ? last[i] : other[i];
    } else if (picture.shown & kLastButOne) {  // the step's last frame is never shown: it has ended the episode
      scale_maximum(picture.image_start >= 0 ? image_of_start(picture.image_start) : image, last_but_one);
    }
    if (picture.is_final && batch.final_stacks) {
      uint8_t* const final_stack = batch.final_stacks + console * settings.stack * plane + pixel;
      for (int i = 0; i < settings.stack; ++i) final_stack[i * plane] = stack[i * plane];
    }
  }
  if (picture.start >= 0) {
    for (int i = 0; i < settings.stack - 1; ++i) stack[i * plane] = 0;
    scale_maximum(image_of_start(picture.start), image_of_start(picture.start));
  }
  if (console == 0 && pixel == 0) *batch.num_again = 0;
}

// How the compiler has laid out what host and device share. They have to agree before any kernel runs.
constexpr int kNumLayout = 10;
template <class Generator>
HD inline void describe(uint32_t* layout) {
  const uint32_t found[kNumLayout] = {sizeof(Batch),   sizeof(Vcs),       sizeof(Progress), sizeof(Picture),
                                      sizeof(Rom),     sizeof(Taps),      sizeof(Settings), sizeof(Generator),
                                      offsetof(Batch, vcs), offsetof(Batch, truncated)};
  for (int i = 0; i < kNumLayout; ++i) layout[i] = found[i];
}

}  // namespace beast::atari
