// Many environments of one game, stepped by a fixed team of threads straight into the caller's memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "env.h"
#include "team.h"

namespace beast::atari {

// What a pool is to do with n = ids.size() environments, and where the results go: element k of every array is of
// environment ids[k]. The caller owns the arrays that the pointers lead to, of the lengths in brackets.
struct Job {
  enum class Kind { kReset, kSeededReset, kStep };
  Kind kind = Kind::kStep;
  std::vector<int32_t> ids;               // no two are equal
  std::vector<int32_t> actions;           // [n], indices; read by kStep
  std::vector<uint32_t> seeds;            // [n]; read by kSeededReset
  uint8_t* observations = nullptr;        // [n] times Protocol::stack_bytes(), which begin at multiples of the stride
  size_t observation_stride = 0;          // bytes, at least Protocol::stack_bytes()
  uint8_t* final_observations = nullptr;  // [n, Protocol::stack_bytes()] or null; SAME_STEP: of episodes that end
  int32_t* rewards = nullptr;             // [n]
  int32_t* lives = nullptr;               // [n]
  int32_t* frame_numbers = nullptr;       // [n]
  int32_t* episode_frame_numbers = nullptr;  // [n]
  int32_t* errors = nullptr;                 // [n], of Error
  bool* terminated = nullptr;                // [n]
  bool* truncated = nullptr;                 // [n]
};

constexpr uint64_t kStateMagic = 0x3430'6574'6174'7341;  // "Astate04": count it up when the meaning of EnvState changes

class Pool {
 public:
  // Copies the ROM.
  Pool(const Rom& rom, const EnvSettings& settings, const Palette& palette, int num_envs, int num_threads)
      : rom_(rom), protocol_(rom_, settings, palette), team_(num_threads) {
    states_.resize(num_envs);
    before_.resize(num_envs);
    rgb_.resize(num_envs * protocol_.rgb_bytes());
    stacks_.resize(num_envs * protocol_.stack_bytes());
    for (int member = 0; member < num_threads; ++member) scratch_.push_back(protocol_.make_scratch());
  }
  Pool(const Pool&) = delete;  // protocol_ refers to rom_
  Pool& operator=(const Pool&) = delete;

  const Protocol& protocol() const { return protocol_; }
  int num_envs() const { return static_cast<int>(states_.size()); }
  bool lost_threads() const { return team_.lost_threads(); }
  size_t bytes_per_env() const { return 2 * sizeof(EnvState) + protocol_.rgb_bytes() + protocol_.stack_bytes(); }
  bool was_reset(int id) const { return states_[id].was_reset; }

  // The job that run() or start() does; it may change between wait() and the next start().
  Job& job() { return job_; }

  void run() { team_.run(&Pool::work, this); }
  // run() in two parts. Nothing else may be called in between.
  void start() { team_.start(&Pool::work, this); }
  void wait() { team_.wait(); }

  void observe(int id, uint8_t* observation) { protocol_.observe(env(id), observation); }
  const uint8_t* rgb(int id) const { return rgb_.data() + id * protocol_.rgb_bytes(); }
  const EnvState& state(int id) const { return states_[id]; }

  StepResult info(int id) const { return protocol_.info(states_[id]); }

  // Bytes of an environment, which restore() of a pool of the same game and settings takes, in any process.
  size_t clone_bytes() const { return sizeof(Header) + bytes_per_env(); }

  void clone(int id, uint8_t* bytes) {
    const Env from = env(id);
    uint8_t* at = bytes + sizeof(Header);
    const auto append = [&at](const void* part, size_t size) {
      if (size) std::memcpy(at, part, size);
      at += size;
    };
    append(from.state, sizeof(EnvState));
    append(from.before, sizeof(EnvState));
    append(from.rgb, protocol_.rgb_bytes());
    append(from.stack, protocol_.stack_bytes());
    const Header header = header_of(bytes);
    std::memcpy(bytes, &header, sizeof(header));
  }

  // Throws std::invalid_argument for bytes that are not of a clone of this game with these settings.
  void check(const uint8_t* bytes, size_t size) const {
    if (size != clone_bytes()) {
      throw std::invalid_argument("a state of this game with these settings has " + std::to_string(clone_bytes()) +
                                  " bytes, not " + std::to_string(size));
    }
    Header found;
    std::memcpy(&found, bytes, sizeof(found));
    const Header expected = header_of(bytes);
    if (found.magic != expected.magic) {
      throw std::invalid_argument("these bytes are no state of an Atari environment, or of another version of Beast");
    }
    if (found.game != expected.game) {
      throw std::invalid_argument(
          "this state is of another game or of other settings: restore it where both are the same");
    }
    EnvState states[2];
    std::memcpy(states, bytes + sizeof(Header), sizeof(states));
    if (found.checksum != expected.checksum || !is_possible(states[0]) || !is_possible(states[1])) {
      throw std::invalid_argument("this state is damaged, or of an environment that was never reset");
    }
  }

  // Makes environment `id` what clone() was called on. Throws what check() does; the environment then stays as it is.
  void restore(int id, const uint8_t* bytes, size_t size) {
    check(bytes, size);
    const Env to = env(id);
    const uint8_t* at = bytes + sizeof(Header);
    const auto take = [&at](void* part, size_t part_size) {
      if (part_size) std::memcpy(part, at, part_size);
      at += part_size;
    };
    take(to.state, sizeof(EnvState));
    take(to.before, sizeof(EnvState));
    take(to.rgb, protocol_.rgb_bytes());
    take(to.stack, protocol_.stack_bytes());
  }

 private:
  struct Header {
    uint64_t magic, game, checksum;
  };

  Env env(int id) {
    return {&states_[id], &before_[id], rgb_.data() + id * protocol_.rgb_bytes(),
            stacks_.data() + id * protocol_.stack_bytes()};
  }

  static void work(void* pool, int member) { static_cast<Pool*>(pool)->work(member); }

  // The member's share of the job: an equal part of the environments, the same in every step.
  void work(int member) {
    const int64_t count = static_cast<int64_t>(job_.ids.size()), size = team_.size();
    Protocol::Scratch& scratch = scratch_[member];
    for (int64_t k = count * member / size; k < count * (member + 1) / size; ++k) {
      const Env target = env(job_.ids[k]);
      uint8_t* final_observation =
          job_.final_observations ? job_.final_observations + k * protocol_.stack_bytes() : nullptr;
      StepResult result;
      switch (job_.kind) {
        case Job::Kind::kReset:
          result = protocol_.reset(target, scratch);
          break;
        case Job::Kind::kSeededReset:
          result = protocol_.reset(target, job_.seeds[k], scratch);
          break;
        case Job::Kind::kStep:
          result = protocol_.step(target, job_.actions[k], final_observation, scratch);
          break;
      }
      protocol_.observe(target, job_.observations + k * job_.observation_stride);
      job_.rewards[k] = static_cast<int32_t>(result.reward);
      job_.errors[k] = result.error;
      job_.terminated[k] = result.terminated;
      job_.truncated[k] = result.truncated;
      job_.lives[k] = result.lives;
      job_.frame_numbers[k] = result.frame_number;
      job_.episode_frame_numbers[k] = result.episode_frame_number;
    }
  }

  bool is_possible(const EnvState& state) const {
    return state.oldest >= 0 && state.oldest < protocol_.settings().stack && state.progress.frames >= 0 &&
           state.progress.frames <= kMostFrames && state.has_ended <= 1 && state.was_reset == 1 &&
           state.noop_draws < 1u << 24 && state.action >= 0 && state.action < kNumActions && state.start_frames >= -1 &&
           state.start_frames <= std::max(1, protocol_.settings().noop_max) && is_valid(state.vcs) &&
           is_valid(state.generators);
  }

  Header header_of(const uint8_t* bytes) const {
    const uint8_t* payload = bytes + sizeof(Header);
    return {kStateMagic, protocol_.fingerprint(), hash(payload, clone_bytes() - sizeof(Header))};
  }

  const Rom rom_;
  const Protocol protocol_;  // refers to rom_, which is made before it and destroyed after it
  std::vector<EnvState> states_, before_;
  std::vector<uint8_t> rgb_, stacks_;
  std::vector<Protocol::Scratch> scratch_;
  Job job_;
  Team team_;  // the last member: its threads end first
};

}  // namespace beast::atari
