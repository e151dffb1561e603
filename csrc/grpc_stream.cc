#include "grpc_stream.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <stdlib.h>  // setenv

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "wire.h"

namespace beast {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr char kMethod[] = "/beast.rpc.Environments/Stream";
constexpr size_t kQuotaBytes = 32 << 20;  // of a connection, beside its messages
constexpr milliseconds kStatusTimeout{1000};  // for the status of a stream that has ended

// On gRPC's monotonic clock: changes of the system time do not move it.
gpr_timespec deadline_after(milliseconds timeout) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(timeout.count(), GPR_TIMESPAN));
}

milliseconds until(Clock::time_point deadline) {
  return std::max(std::chrono::ceil<milliseconds>(deadline - Clock::now()), milliseconds(0));
}

std::string seconds(milliseconds duration) {
  std::string text = std::to_string(duration.count() / 1000.0);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

bool starts_with(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

bool is_unix(const std::string& address) {
  return starts_with(address, "unix:") || starts_with(address, "unix-abstract:");
}

bool is_loopback(const std::string& address) {
  std::string host = address;
  for (const char* scheme : {"dns:///", "dns:", "ipv4:", "ipv6:"}) {
    if (starts_with(host, scheme)) host.erase(0, std::string(scheme).size());
  }
  host = host.substr(0, host.rfind(':'));
  if (host == "localhost" || host == "[::1]") return true;
  // Digits and dots only: 127.example.com is not this machine.
  return starts_with(host, "127.") && host.find_first_not_of("0123456789.") == std::string::npos;
}

const char* code_name(grpc::StatusCode code) {
  static const char* const names[] = {
      "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
      "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
      "DATA_LOSS", "UNAUTHENTICATED"};
  return static_cast<size_t>(code) < std::size(names) ? names[code] : "unknown status";
}

// Whether the server will refuse this learner at every try.
bool is_refusal(grpc::StatusCode code) {
  return code == grpc::UNAUTHENTICATED || code == grpc::PERMISSION_DENIED || code == grpc::FAILED_PRECONDITION ||
         code == grpc::INVALID_ARGUMENT || code == grpc::UNIMPLEMENTED;
}

// The server is not there yet or has no room yet: open() tries again until connect_timeout.
struct NotYet : ConnectionError {
  using ConnectionError::ConnectionError;
};

// An operation took longer than its timeout.
struct NoAnswer : ConnectionError {
  using ConnectionError::ConnectionError;
};

using Headers = std::vector<std::pair<std::string, std::string>>;

// One gRPC call. Operations run one after another, and each is waited for, so they all use one tag.
class Call {
 public:
  Call(grpc::GenericStub& stub, grpc::CompletionQueue& queue, const Headers& headers) : queue_(queue) {
    for (const auto& [name, value] : headers) context_.AddMetadata(name, value);
    stream_ = stub.PrepareCall(&context_, kMethod, &queue);
  }

  // gRPC requires that all operations have ended and the call is finished before its memory is freed.
  ~Call() {
    context_.TryCancel();
    if (pending_) reap();
    if (started_ && !finished_) finish();
  }

  void cancel() { context_.TryCancel(); }  // from any thread

  // The next three return false once the stream has ended, and throw NoAnswer after `timeout`.
  bool start(milliseconds timeout) {
    started_ = true;
    stream_->StartCall(this);
    return wait(timeout);
  }

  bool write(const std::string& message, milliseconds timeout) {
    if (finished_) return false;
    const grpc::Slice slice(message);
    stream_->Write(grpc::ByteBuffer(&slice, 1), this);
    return wait(timeout);
  }

  bool read(grpc::ByteBuffer* message, milliseconds timeout) {
    if (finished_) return false;
    stream_->Read(message, this);
    return wait(timeout);
  }

  // Returns why the stream has ended.
  grpc::Status finish() {
    if (std::exchange(finished_, true)) return status_;
    stream_->Finish(&status_, this);
    try {
      wait(kStatusTimeout);
    } catch (const NoAnswer&) {
    }
    return status_;
  }

 private:
  bool wait(milliseconds timeout) {
    void* tag;
    bool ok = false;
    pending_ = true;
    if (queue_.AsyncNext(&tag, &ok, deadline_after(timeout)) == grpc::CompletionQueue::TIMEOUT) {
      context_.TryCancel();
      reap();
      throw NoAnswer("no answer within " + seconds(timeout));
    }
    pending_ = false;
    return ok;
  }

  void reap() {  // waits for an operation that was cancelled, which ends at once
    void* tag;
    bool ok;
    queue_.Next(&tag, &ok);
    pending_ = false;
  }

  grpc::CompletionQueue& queue_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  grpc::Status status_;
  bool pending_ = false, started_ = false, finished_ = false;
};

class GrpcStream : public EnvStream {
 public:
  explicit GrpcStream(const GrpcOptions& options) : options_(options) { check(options); }

  ~GrpcStream() override {
    call_.reset();
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  StreamSpec open(uint64_t seed) override {
    return named([&] { return connect(seed); });
  }

  void read_row(const std::vector<std::byte*>& destinations) override {
    named([&] {
      grpc::ByteBuffer message;
      if (!call_->read(&message, options_.env_timeout)) throw_status();
      grpc::ProtoBufferReader reader(&message);
      beast::read_row(&reader, message.Length(), field_bytes_, destinations);
    });
  }

  void write_actions(const Nest<Array>& actions) override {
    named([&] {
      if (call_->write(actions_message(actions), options_.env_timeout)) return;
      grpc::ByteBuffer message;  // the stream has ended, but the server's last message may be unread
      if (call_->read(&message, options_.env_timeout)) {
        grpc::ProtoBufferReader reader(&message);
        beast::read_row(&reader, message.Length(), {}, {});
      }
      throw_status();
    });
  }

  void cancel() override {
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
    cancelled_now_.notify_all();
    if (call_) call_->cancel();
  }

 private:
  // A connection that ends at a message of more bytes than that, before memory is taken for it.
  static std::shared_ptr<grpc::Channel> make_channel(const GrpcOptions& options, size_t max_message_bytes) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(static_cast<int>(std::min<size_t>(max_message_bytes, kMaxMessageBytes)));
    // gRPC compares a message's length with the limit when it has all of it, but takes no more memory than its quota.
    grpc::ResourceQuota quota;
    quota.Resize(4 * max_message_bytes + kQuotaBytes);
    arguments.SetResourceQuota(quota);
    arguments.SetMaxSendMessageSize(-1);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection for each stream
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);          // http_proxy is for the web, not for a cluster
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    // A cut link is noticed after the sum of the two. An interruption of less than 20 seconds is not.
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
    std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
    if (!options.root_certificates.empty() && !is_unix(options.address)) {
      grpc::SslCredentialsOptions tls;
      tls.pem_root_certs = options.root_certificates;
      credentials = grpc::SslCredentials(tls);
    }
    return grpc::CreateCustomChannel(options.address, credentials, arguments);
  }

  // Asks for the hello alone first: it says how long a row may be.
  StreamSpec connect(uint64_t seed) {
    const Clock::time_point deadline = Clock::now() + options_.connect_timeout;
    StreamSpec spec = retry(deadline, [&] { return shake_hands(seed, true, kMaxHelloBytes, deadline); });
    if (options_.only_hello) return spec;
    field_bytes_ = field_bytes(spec);
    const size_t row_bytes = std::accumulate(field_bytes_.begin(), field_bytes_.end(), size_t{0});
    const size_t longest = std::max(row_bytes, hello_bytes_) + kMaxErrorBytes;
    const StreamSpec again = retry(deadline, [&] { return shake_hands(seed, false, longest, deadline); });
    const std::string other = difference(again, spec);
    if (!other.empty()) throw HandshakeError("the stream has " + other + ", as the same server said a moment before");
    return spec;
  }

  template <typename Function>
  StreamSpec retry(Clock::time_point deadline, Function&& shake_hands) {
    for (milliseconds pause(50);; pause = std::min(2 * pause, milliseconds(1000))) {
      try {
        return shake_hands();
      } catch (const NoAnswer&) {
        throw ConnectionError("no answer within " + seconds(options_.connect_timeout));
      } catch (const NotYet& error) {
        if (Clock::now() >= deadline) {
          throw ConnectionError("not reached within " + seconds(options_.connect_timeout) + ": " + error.what() +
                                tls_hint());
        }
      }
      std::unique_lock<std::mutex> lock(mutex_);
      cancelled_now_.wait_for(lock, std::min(pause, until(deadline)), [&] { return cancelled_; });
    }
  }

  StreamSpec shake_hands(uint64_t seed, bool only_hello, size_t max_message_bytes, Clock::time_point deadline) {
    deadline = std::max(deadline, Clock::now() + kStatusTimeout);  // the last try needs time for its answer, too
    Headers headers = {{"hello-bin", learner_hello(seed, options_.env, only_hello)}};
    if (!options_.token.empty()) headers.emplace_back("authorization", authorization(options_.token));
    {
      std::unique_ptr<Call> last;  // destroyed after the lock is released
      std::lock_guard<std::mutex> lock(mutex_);
      if (cancelled_) throw ConnectionError("the stream was cancelled");
      last = std::move(call_);
      if (!stub_ || max_message_bytes != max_message_bytes_) {
        stub_ = std::make_unique<grpc::GenericStub>(make_channel(options_, max_message_bytes));
        max_message_bytes_ = max_message_bytes;
      }
      call_ = std::make_unique<Call>(*stub_, queue_, headers);
    }
    grpc::ByteBuffer message;
    if (!call_->start(until(deadline)) || !call_->read(&message, until(deadline))) throw_status();
    hello_bytes_ = message.Length();
    grpc::ProtoBufferReader reader(&message);
    return read_hello(&reader, hello_bytes_);
  }

  // A hint for the case that only one side uses TLS, or that the certificate is not trusted: gRPC's error is vague.
  std::string tls_hint() const {
    if (is_unix(options_.address)) return "";
    return options_.root_certificates.empty() ? " (a server with --tls_cert needs root_certificates here)"
                                              : " (root_certificates are for a server with --tls_cert, whose "
                                                "certificate one of them has signed and names this host)";
  }

  [[noreturn]] void throw_status() {
    const grpc::Status status = call_->finish();
    if (status.ok()) throw ConnectionError("the server ended the stream");
    std::string text = std::string(code_name(status.error_code())) + ": " + readable(status.error_message());
    if (is_refusal(status.error_code())) throw HandshakeError(text);
    // In the words of gRPC and OpenSSL. It is a status of a server that is not there yet, too, but a certificate stays what it is.
    for (const char* certificate : {"CERTIFICATE_VERIFY_FAILED", "certificate verify failed", "not in peer certificate"}) {
      if (text.find(certificate) != std::string::npos) throw HandshakeError(text + tls_hint());
    }
    bool too_long = false;
    for (const char* words : {"larger than max", "Buffers full"}) too_long |= text.find(words) != std::string::npos;
    if (too_long) text += " (a message may have " + std::to_string(max_message_bytes_) + " bytes)";
    if (status.error_code() == grpc::UNAVAILABLE || (status.error_code() == grpc::RESOURCE_EXHAUSTED && !too_long)) {
      throw NotYet(text);
    }
    throw ConnectionError(text);
  }

  // Adds the address to every error, and makes what the server sent safe to show.
  template <typename Function>
  auto named(Function&& function) -> decltype(function()) {
    const std::string server = "environment server " + options_.address + ": ";
    const auto shown = [](const std::exception& error) { return readable(std::string(error.what()).substr(0, 2000)); };
    try {
      return function();
    } catch (const EnvError& error) {
      throw EnvError(server + error.what());  // which is readable, and may be long
    } catch (const HandshakeError& error) {
      throw HandshakeError(server + shown(error));
    } catch (const ConnectionError& error) {
      throw ConnectionError(server + shown(error));
    }
  }

  const GrpcOptions options_;
  std::unique_ptr<grpc::GenericStub> stub_;
  size_t max_message_bytes_ = 0;  // of stub_'s channel
  size_t hello_bytes_ = 0;        // of the last one
  grpc::CompletionQueue queue_;
  std::vector<size_t> field_bytes_;
  std::mutex mutex_;  // guards what follows; only the stream's own thread replaces call_
  std::condition_variable cancelled_now_;
  std::unique_ptr<Call> call_;
  bool cancelled_ = false;
};

}  // namespace

// Threads that wait for a connection make gRPC read it. While the learner is busy (it may compile its net for a
// minute), none waits, and a timer of gRPC reads one connection per tick, by default every 5 seconds. With more than a
// few streams that is too slow for the answers to keepalives. At 20 ms it is fast enough for hundreds of streams.
void poll_idle_connections() { setenv("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "20", /*overwrite=*/0); }

void check(const GrpcOptions& options) {
  if (!is_unix(options.address)) {
    const size_t colon = options.address.rfind(':');
    const std::string port = colon == std::string::npos ? "" : options.address.substr(colon + 1);
    if (colon == 0 || port.empty() || port.find_first_not_of("0123456789") != std::string::npos) {
      throw std::invalid_argument("\"" + options.address +
                                  "\" is not an address of an environment server: expected unix:/path or host:port");
    }
  }
  if (!options.token.empty() && options.root_certificates.empty() && !options.insecure && !is_unix(options.address) &&
      !is_loopback(options.address)) {
    throw std::invalid_argument("the token for " + options.address +
                                " would cross the network in plain text: give "
                                "root_certificates (and the server --tls_cert and --tls_key), or insecure=True");
  }
}

std::unique_ptr<EnvStream> make_grpc_stream(const GrpcOptions& options) {
  return std::make_unique<GrpcStream>(options);
}

}  // namespace beast
