#include "grpc_log.h"

#include <grpc/support/log.h>
#include <grpcpp/version_info.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "wire.h"

namespace beast {

#if GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR < 65

namespace {

constexpr size_t kMaxShown = 300;  // bytes of a message
constexpr int64_t kLinesPerMinute = 20;

void log(gpr_log_func_args* message) {
  static std::mutex mutex;
  const auto now = std::chrono::steady_clock::now();
  std::lock_guard<std::mutex> lock(mutex);
  static auto began = now;
  static int64_t num_lines = 0;
  std::string line;
  if (now - began > std::chrono::minutes(1)) {
    const int64_t num_left_out = num_lines - kLinesPerMinute;
    if (num_left_out > 0) line = "gRPC: " + std::to_string(num_left_out) + " lines like the next one were left out\n";
    began = now;
    num_lines = 0;
  }
  if (++num_lines > kLinesPerMinute) return;
  std::string shown = readable(std::string(message->message).substr(0, kMaxShown));
  for (char& byte : shown) byte = byte == '\n' ? ' ' : byte;  // or a caller could write lines of his own
  line += "gRPC: " + shown + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace

void guard_grpc_log() {
  if (std::getenv("GRPC_TRACE")) return;
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
  gpr_set_log_function(log);
}

#else  // it logs by Abseil, which the whole process shares

void guard_grpc_log() {
  if (!std::getenv("GRPC_TRACE")) setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
}

#endif

}  // namespace beast
