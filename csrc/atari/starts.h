// The states that a batch's episodes begin with, made on a CPU.
//
// In most games the state after a reset depends on what the reset draws and on nothing else: one of 75 values of the
// timer, and the number of start frames. A copy from the table then is what a pool's reset makes, to the bit. These differ:
// - crossbow, hangman, haunted_house, ice_hockey, kung_fu_master, pooyan, sir_lancelot, space_war, surround,
//   time_pilot and yars_revenge, where some RAM of the episode before survives, and elevator_action, whose cartridge
//   has RAM of random bytes, but for the first reset;
// - episodes that begin with FIRE, with sticky actions;
// - amidar, where no frame was played since the load.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "batch.h"
#include "env.h"

namespace beast::atari {

class StartTable {
 public:
  // Of `num_resets` resets of each console, the one behind the load among them. Throws std::invalid_argument for
  // settings that batches do not have.
  StartTable(const Rom& rom, const Protocol& protocol, int num_resets) : rom_(rom), protocol_(protocol) {
    const EnvSettings& settings = protocol.settings();
    if (protocol.draws_indices()) throw std::invalid_argument("a batch has gray images of NTSC games only");
    if (settings.noop_max > 256) throw std::invalid_argument("a batch's episodes begin with up to 255 no-ops");
    if (protocol.load_depends_on_seed()) throw std::invalid_argument("a batch has no games whose load depends on the seed");
    if (num_resets < 2) throw std::invalid_argument("a batch has two resets of each console or more");
    num_lengths_ = 1 + start_frames(protocol.fires(), std::max(settings.noop_max, 1) - 1);
    EnvState state = protocol.loaded();
    state = play_starts(state);
    // The timers of the resets that follow are the same in all consoles: ALE seeds their generators alike.
    int row_of[kNumTimers] = {};
    rows_ = {0};
    while (static_cast<int>(rows_.size()) < num_resets) {
      EnvState after = state;
      reset_system(rom, after.vcs, after.generators);
      int& row = row_of[after.vcs.riot.value - kLeastTimer];
      if (!row) {
        row = num_rows_;
        state.vcs.frame_number = 1;  // not 0: see kHardUntilFirstAction
        play_starts(state);
        for (size_t i = states_.size() - num_lengths_; i < states_.size(); ++i) --states_[i].frame_number;
      }
      rows_.push_back(static_cast<uint8_t>(row));
      state.generators.system = after.generators.system;
    }
  }

  // All but `lengths`.
  Starts starts() const {
    const int num_resets = static_cast<int>(rows_.size());
    return {states_.data(), images_.data(), rows_.data(), nullptr, num_lengths_, num_resets, protocol_.draws_of_reset()};
  }

  int num_starts() const { return num_rows_ * num_lengths_; }

 private:
  // Resets the game and adds a row: the states after 0, 1, 2 … start frames. Returns the first of them.
  EnvState play_starts(EnvState state) {
    std::vector<uint8_t> screens[2];
    for (std::vector<uint8_t>& pixels : screens) pixels.resize(static_cast<size_t>(protocol_.rows()) * kScreenWidth);
    int current = 0;
    const AlternatingOutput output = {{screens[0].data(), screens[1].data()}, protocol_.rows(), true, &current};
    reset_game(rom_, state.vcs, state.generators, output);
    const EnvState first = state;
    for (int length = 0; length < num_lengths_; ++length) {
      states_.push_back(state.vcs);
      images_.insert(images_.end(), screens[current].begin(), screens[current].end());
      act(rom_, state.vcs, state.generators.user, start_action(protocol_.fires(), length), 0, output);
    }
    ++num_rows_;
    return first;
  }

  const Rom& rom_;
  const Protocol& protocol_;
  std::vector<Vcs> states_;
  std::vector<uint8_t> images_, rows_;
  int num_lengths_ = 0, num_rows_ = 0;
};

}  // namespace beast::atari
