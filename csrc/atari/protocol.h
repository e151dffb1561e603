// What a step of an environment is: its frames, when an episode ends, rewards, starts. CPUs and GPUs run the same
// functions on plain data: env.h calls them for a pool, batch.h for kernels.
//
// Which frames are drawn: as few as can be, because drawing costs time and images cost memory. An image shows the last
// two frames of a step at most. `play` emulates the others without drawing them. A frame that ends early leaves rows
// undrawn, where ALE shows the rows of the frame two before. `play` says so, and its caller takes the environment back
// to before the step and plays the step again, drawing all frames.
#pragma once

#include "vcs.h"

namespace beast::atari {

constexpr int kNoop = 0, kFire = 1;

// What the user chooses about steps.
struct Settings {
  int32_t frame_skip = 4;
  int32_t stack = 4;  // images of an observation, the newest last
  int32_t height = 84, width = 84;
  int32_t max_frames = 108'000;  // of an episode, from the end of its start frames: then it is truncated
  bool max_pool = true;          // an image is the maximum of a step's last two frames
  bool episodic_life = false;    // a lost life ends the episode, and the next one begins with a reset of the game
  bool life_loss_info = false;   // a lost life terminates, and the game goes on
  bool clip_rewards = true;      // to their sign
  bool same_step = false;        // autoreset in the step that ends an episode rather than in the next one
};

// How far an episode is.
struct Progress {
  int32_t frames;  // since its start frames ended
  int32_t lives;   // after the newest frame
};

// What a step or a reset tells of one environment.
struct StepResult {
  int64_t reward = 0;  // a forged state's score may jump far
  bool terminated = false, truncated = false;
  int32_t lives = 0, frame_number = 0, episode_frame_number = 0;
  Error error = kNoError;  // why the console stands still
};

// The frames of a step that its image may show, a bit each: its last but one, its last. An episode's last frame is none
// of them.
enum Shown : uint8_t { kLastButOne = 1, kLast = 2 };

// What frames are drawn into, as the core renders them.
struct Screens {
  uint8_t* frames[2];  // [rows, 160] each: a step's last frame but one, its last
  bool gray;           // luminances, else indices of the palette
  Lanes lanes;         // that play a step together
};

// The last two pixels of a row that is not drawn are 1 and 0. No luminance is 1, and a frame's indices are all even or,
// where a PAL game has lost its colors, all odd.
HD inline void mark_rows(const Canvas& canvas) {
  for (int i = 0; i < canvas.height; ++i) {
    uint8_t* const end = canvas.row(i) + kScreenWidth;
    end[-2] = 1;
    end[-1] = 0;
  }
}

// Whether all rows were drawn since they were marked. Those that were not become black.
HD inline bool clear_marked_rows(const Canvas& canvas) {
  bool is_whole = true;
  for (int i = 0; i < canvas.height; ++i) {
    uint8_t* const row = canvas.row(i);
    if (row[kScreenWidth - 2] != 1 || row[kScreenWidth - 1] != 0) continue;
    memset(row, 0, kScreenWidth);
    is_whole = false;
  }
  return is_whole;
}

// Plays the frames of a step and draws those that are seen. Returns false if one of them ended early. Its other rows
// then show the frame two before: `sees_all` draws all frames to have them. Rows that an earlier step has drawn are
// black. All of screens.lanes have to call this together.
template <class Generator>
HD bool play(const Rom& rom, const Settings& settings, uint64_t sticky, int action, bool sees_all,
             const Screens& screens, Vcs& vcs, Generator& generator, Progress& progress, StepResult& result,
             int& shown) {
  bool is_whole = true, goes_on = true;
  result = StepResult{};
  shown = 0;
  for (int k = 0; k < settings.frame_skip; ++k) {
    if (!lanes_where(screens.lanes, goes_on)) break;
    const Lanes lanes = lanes_where(screens.lanes, goes_on && is_running(vcs));
    if (!goes_on) continue;  // it waits for the other lanes
    const int from_end = settings.frame_skip - 1 - k;
    const bool is_seen = from_end == 0 || (from_end == 1 && settings.max_pool), is_drawn = is_seen || sees_all;
    const bool is_marked = is_drawn && !(sees_all && k >= 2);  // else it is drawn over what is there
    const Canvas canvas = {is_drawn ? screens.frames[from_end % 2 == 0] : nullptr, is_drawn ? rom.game.height : 0,
                           screens.gray, lanes};
    if (is_marked) mark_rows(canvas);
    result.reward += act(rom, vcs, generator, action, sticky, ScreenOutput{canvas});
    if (is_marked) is_whole &= clear_marked_rows(canvas);
    ++progress.frames;
    const int lives_now = lives(vcs);
    result.terminated = game_over(vcs) || (settings.episodic_life && lives_now < progress.lives);
    result.truncated = !result.terminated && progress.frames >= settings.max_frames;
    progress.lives = lives_now;
    goes_on = !result.terminated && !result.truncated && !vcs.error;
    if (goes_on && is_seen) shown |= from_end == 0 ? kLast : kLastButOne;
  }
  return is_whole;
}

// Whether a step in which a frame ended early has to be played again: else all of its frames were drawn.
HD inline bool needs_all_frames(const Settings& settings) { return settings.frame_skip > 2; }

// What follows the frames of a step that began with so many lives. Returns whether the episode has ended.
HD inline bool end_step(const Settings& settings, int lives_before, const Progress& progress, StepResult& result) {
  const bool has_ended = result.terminated || result.truncated;
  if (settings.life_loss_info && progress.lives < lives_before) result.terminated = true;
  if (settings.clip_rewards) result.reward = (result.reward > 0) - (result.reward < 0);
  return has_ended;
}

HD inline void add_info(const Vcs& vcs, const Progress& progress, StepResult& result) {
  result.lives = progress.lives;
  result.frame_number = static_cast<int32_t>(vcs.frame_number);
  result.error = vcs.error;
  result.episode_frame_number = static_cast<int32_t>(vcs.episode_frame_number);
}

// The start frames lie between the game's reset and the first observation. `fires`: the first of them is FIRE.
HD inline int start_action(bool fires, int start_frame) { return start_frame == 0 && fires ? kFire : kNoop; }
HD inline int start_frames(bool fires, int noops) { return fires && noops < 1 ? 1 : noops; }

// The number of no-ops of an episode, uniform in [0, noop_max), as libstdc++'s uniform_int_distribution draws (Lemire
// 2019). Adds what it draws to `draws`.
HD inline int draw_noops(Mt19937& generator, uint32_t noop_max, uint32_t& draws) {
  uint64_t product;
  do {
    product = static_cast<uint64_t>(generator.draw()) * noop_max;
    ++draws;
  } while (static_cast<uint32_t>(product) < -noop_max % noop_max);
  return static_cast<int>(product >> 32);
}

HD inline void begin_episode(const Vcs& vcs, Progress& progress) { progress = {0, lives(vcs)}; }

}  // namespace beast::atari
