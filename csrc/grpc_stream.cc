#include "grpc_stream.h"

#include <grpcpp/alarm.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <future>
#include <iterator>
#include <utility>
#include <vector>

#include "grpc_loop.h"
#include "wire.h"

namespace beast {
namespace {

using std::chrono::milliseconds;

constexpr size_t kQuotaBytes = 32 << 20;  // of a connection, beside its messages
constexpr milliseconds kFirstPause{50}, kLongestPause{1000};  // between tries to connect

milliseconds until(Clock::time_point deadline) {
  return std::max(std::chrono::ceil<milliseconds>(deadline - Clock::now()), milliseconds(0));
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

using Headers = std::vector<std::pair<std::string, std::string>>;

class ClientCall : public GrpcCall {
 public:
  ClientCall(GrpcLoop& loop, grpc::GenericStub& stub, const Headers& headers) : GrpcCall(loop) {
    for (const auto& [name, value] : headers) context_.AddMetadata(name, value);
    stream_ = stub.PrepareCall(&context_, kStreamMethod, &loop.queue());
  }

  void start(Then then) {
    operate([&](void* tag) { stream_->StartCall(tag); }, std::move(then));
  }
  void cancel() override { context_.TryCancel(); }

 private:
  void start_read(grpc::ByteBuffer* message, void* tag) override { stream_->Read(message, tag); }
  void start_write(const grpc::ByteBuffer& message, void* tag) override { stream_->Write(message, tag); }
  void start_finish(grpc::Status* status, void* tag) override { stream_->Finish(status, tag); }

  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
};

// A stream to a server that listens.
class ClientStream : public GrpcStream {
 public:
  ClientStream(GrpcLoop& loop, const GrpcOptions& options)
      : GrpcStream(loop, options.address, options.env_timeout), options_(options) {
    check(options);
  }

  void open(uint64_t seed, Owner* owner) override {
    owner_ = owner;
    seed_ = seed;
    give_up_at_ = Clock::now() + options_.connect_timeout;
    // Asks for the hello alone first: it says how long a row may be.
    max_message_bytes_ = kMaxHelloBytes;
    shake_hands();
  }

  void read_first_row(std::vector<std::byte*> destinations) override { exchange(nullptr, std::move(destinations)); }

  void refuse(const std::string&) override { cancel(); }  // the server need not know

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
    // A small message could grow a thousandfold before its length is compared. Beast compresses none.
    arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection for each stream
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);          // http_proxy is for the web, not for a cluster
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    // A cut link is noticed after the sum of the two. An interruption of less than 20 seconds is not.
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // no limit: a step may take longer than two pings
    std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
    if (!options.root_certificates.empty() && !is_unix(options.address)) {
      grpc::SslCredentialsOptions tls;
      tls.pem_root_certs = options.root_certificates;
      credentials = grpc::SslCredentials(tls);
    }
    return grpc::CreateCustomChannel(options.address, credentials, arguments);
  }

  void shake_hands() {
    Headers headers = {{"hello-bin", learner_hello(seed_, options_.env, /*only_hello=*/!has_asked_, progress_)}};
    if (!options_.token.empty()) headers.emplace_back("authorization", authorization(options_.token));
    if (!stub_) stub_ = std::make_unique<grpc::GenericStub>(make_channel(options_, max_message_bytes_));
    const auto call = std::make_shared<ClientCall>(loop_, *stub_, headers);
    bool is_cancelled;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_cancelled = is_cancelled_;
      if (!is_cancelled) call_ = call;
      set_timeout(std::max(until(give_up_at_), kStatusTimeout));  // the last try needs time for its answer, too
      forget_lateness();  // of a call before, whose hello came at its last moment
    }
    if (is_cancelled) return tell_lost(std::make_exception_ptr(ConnectionError("the stream was cancelled")));
    const auto self = std::static_pointer_cast<ClientStream>(shared_from_this());
    call->start([self, call](bool ok) {
      if (!ok) return self->end_try(nullptr);
      call->read(&self->message_, [self](bool ok) { self->hello_came(ok); });
    });
  }

  void hello_came(bool ok) {
    if (!ok) return end_try(nullptr);
    StreamSpec spec;
    try {
      const size_t length = message_.Length();
      grpc::ProtoBufferReader reader(&message_);
      spec = read_hello(&reader, length);
      if (has_asked_) {
        const std::string other = difference(spec, spec_);
        if (!other.empty()) {
          throw HandshakeError("the stream has " + other + ", as the same server said a moment before");
        }
      }
      if (has_asked_ || options_.only_hello) {
        set_row(spec);
        {
          std::lock_guard<std::mutex> lock(mutex_);
          end_timeout();
        }
        return owner_->opened(spec);
      }
      spec_ = spec;
      has_asked_ = true;
      max_message_bytes_ = std::max(row_bytes(spec), length) + kMaxErrorBytes;
    } catch (...) {
      return end_try(std::current_exception());
    }
    // The stream itself, in a connection that takes no longer messages than it needs.
    std::shared_ptr<GrpcCall> call;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      call = std::move(call_);
    }
    call->cancel();
    call->finish([](const grpc::Status&) {});
    stub_.reset();
    pause_ = kFirstPause;
    shake_hands();
  }

  // Ends a call that has not opened the stream, and tries again where that may help. A null `why` is the call's status.
  void end_try(std::exception_ptr why) {
    std::shared_ptr<GrpcCall> call;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      call = call_;
      if (!is_late()) set_timeout(kStatusTimeout);
    }
    if (why) call->cancel();
    call->finish([self = std::static_pointer_cast<ClientStream>(shared_from_this()), why](const grpc::Status& status) {
      self->try_ended(why, status);
    });
  }

  void try_ended(std::exception_ptr why, const grpc::Status& status) {
    bool is_cancelled;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const std::string limit = seconds(options_.connect_timeout);
      if (!why && is_late()) why = std::make_exception_ptr(ConnectionError("no answer within " + limit));
      is_cancelled = is_cancelled_;
      end_timeout();
      call_.reset();
    }
    if (!why) why = error_of(status);
    try {
      std::rethrow_exception(why);
    } catch (const NotYet& error) {
      if (is_cancelled) return tell_lost(why);
      if (Clock::now() < give_up_at_) return try_again();
      tell_lost(std::make_exception_ptr(ConnectionError("not reached within " + seconds(options_.connect_timeout) +
                                                        ": " + error.what() + tls_hint())));
    } catch (...) {
      tell_lost(why);
    }
  }

  void try_again() {
    const milliseconds pause = std::min(std::exchange(pause_, std::min(2 * pause_, kLongestPause)), until(give_up_at_));
    const auto self = std::static_pointer_cast<ClientStream>(shared_from_this());
    std::lock_guard<std::mutex> lock(mutex_);
    alarm_.Set(&loop_.queue(), deadline_after(is_cancelled_ ? milliseconds(0) : pause),
               GrpcLoop::tag([self](bool) { self->shake_hands(); }));
  }

  void cancelled() override { alarm_.Cancel(); }

  // A hint for the case that only one side uses TLS, or that the certificate is not trusted: gRPC's error is vague.
  std::string tls_hint() const {
    if (is_unix(options_.address)) return "";
    return options_.root_certificates.empty() ? " (a server with --tls_cert needs root_certificates here)"
                                              : " (root_certificates are for a server with --tls_cert, whose "
                                                "certificate one of them has signed and names this host)";
  }

  std::exception_ptr error_of(const grpc::Status& status) override {
    if (status.ok()) return std::make_exception_ptr(ConnectionError("the server ended the stream"));
    std::string text = std::string(code_name(status.error_code())) + ": " + readable(status.error_message());
    if (is_refusal(status.error_code())) return std::make_exception_ptr(HandshakeError(text));
    // In the words of gRPC and OpenSSL. It is a status of a server that is not there yet, too, but a certificate stays what it is.
    for (const char* certificate : {"CERTIFICATE_VERIFY_FAILED", "certificate verify failed", "not in peer certificate"}) {
      if (text.find(certificate) == std::string::npos) continue;
      return std::make_exception_ptr(HandshakeError(text + tls_hint()));
    }
    bool too_long = false;
    for (const char* words : {"larger than max", "Buffers full"}) too_long |= text.find(words) != std::string::npos;
    if (too_long) text += " (a message may have " + std::to_string(max_message_bytes_) + " bytes)";
    if (status.error_code() == grpc::UNAVAILABLE || (status.error_code() == grpc::RESOURCE_EXHAUSTED && !too_long)) {
      return std::make_exception_ptr(NotYet(text));
    }
    return std::make_exception_ptr(ConnectionError(text));
  }

  const GrpcOptions options_;
  uint64_t seed_ = 0;
  Clock::time_point give_up_at_;
  milliseconds pause_ = kFirstPause;
  std::unique_ptr<grpc::GenericStub> stub_;
  size_t max_message_bytes_ = 0;  // of stub_'s channel
  bool has_asked_ = false;        // for the hello alone
  StreamSpec spec_;               // what it said
  grpc::Alarm alarm_;
};

}  // namespace

void check(const GrpcOptions& options) {
  if (!is_unix(options.address)) {
    const size_t colon = options.address.rfind(':');
    const std::string port = colon == std::string::npos ? "" : options.address.substr(colon + 1);
    if (colon == 0 || port.empty() || port.find_first_not_of("0123456789") != std::string::npos) {
      throw std::invalid_argument("\"" + options.address +
                                  "\" is not an address of an environment server: expected unix:/path or host:port");
    }
  }
  // gRPC aborts the process at a header that it cannot send.
  const auto cannot_be_sent = [](unsigned char byte) { return byte < 0x21 || byte > 0x7e; };
  if (std::any_of(options.token.begin(), options.token.end(), cannot_be_sent)) {
    throw std::invalid_argument("the token for " + options.address +
                                " must be ASCII without spaces and line ends: strip what a file has around it");
  }
  if (!options.token.empty() && options.root_certificates.empty() && !options.insecure && !is_unix(options.address) &&
      !is_loopback(options.address)) {
    throw std::invalid_argument("the token for " + options.address +
                                " would cross the network in plain text: give "
                                "root_certificates (and the server --tls_cert and --tls_key), or insecure=True");
  }
}

GrpcStreams::GrpcStreams(size_t num_streams) : loop_(std::make_unique<GrpcLoop>(num_loop_threads(num_streams))) {}
GrpcStreams::~GrpcStreams() = default;

std::shared_ptr<EnvStream> GrpcStreams::connect(const GrpcOptions& options) {
  const auto stream = std::make_shared<ClientStream>(*loop_, options);
  loop_->watch(stream);
  return stream;
}

StreamSpec ask_for_hello(GrpcOptions options, const std::function<void()>& interrupt) {
  struct Asker : EnvStream::Owner {
    void opened(const StreamSpec& spec) override { hello.set_value(spec); }
    void row_came(std::string) override {}
    void lost(std::exception_ptr why) override { hello.set_exception(why); }

    std::promise<StreamSpec> hello;
  };
  options.only_hello = true;
  Asker asker;
  GrpcLoop loop(1);
  const auto stream = std::make_shared<ClientStream>(loop, options);
  loop.watch(stream);
  auto hello = asker.hello.get_future();
  stream->open(0, &asker);
  try {
    while (hello.wait_for(milliseconds(100)) != std::future_status::ready) {
      if (interrupt) interrupt();
    }
  } catch (...) {
    stream->cancel();
    hello.wait();
    throw;
  }
  return hello.get();
}

}  // namespace beast
