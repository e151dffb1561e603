#include "grpc_listener.h"

#include <grpcpp/resource_quota.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "grpc_loop.h"
#include "wire.h"

namespace beast {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kHelloTimeout{10000};
constexpr milliseconds kResetTime{240000};  // more than for a step: 128 of Atari take 25 to 66 CPU seconds
constexpr milliseconds kAcceptTime{50};       // until a thread looks whether its server ends
constexpr int kMaxWaiting = 64;               // callers that have not said their hello
constexpr size_t kMaxUnknown = 1024;          // connections without a hello
constexpr size_t kMaxRefusals = 20;           // that are kept for the log
constexpr size_t kQuotaBytes = 64 << 20;      // of all connections, beside their messages

class DialedCall : public GrpcCall {
 public:
  explicit DialedCall(GrpcLoop& loop) : GrpcCall(loop), stream_(&context_) {}

  void request(grpc::AsyncGenericService& service, grpc::ServerCompletionQueue* notifications, void* tag) {
    done_ = GrpcLoop::tag([self = std::static_pointer_cast<DialedCall>(shared_from_this())](bool) {
      self->has_left_ = self->context_.IsCancelled();
    });
    context_.AsyncNotifyWhenDone(done_);
    service.RequestCall(&context_, &stream_, &loop_.queue(), notifications, tag);
  }
  // gRPC tells the end of calls that came only.
  void forget() { GrpcLoop::then_of(done_); }
  bool has_left() const { return has_left_; }
  void send_headers(const std::string& name, const std::string& value, Then then) {
    context_.AddInitialMetadata(name, value);
    operate([&](void* tag) { stream_.SendInitialMetadata(tag); }, std::move(then));
  }
  void cancel() override { context_.TryCancel(); }

  std::string header(const char* name) const {
    const auto& headers = context_.client_metadata();
    const auto found = headers.find(name);
    return found == headers.end() ? "" : std::string(found->second.data(), found->second.size());
  }
  const std::string& method() const { return context_.method(); }
  std::string peer() const { return decoded_peer(context_.peer()); }
  void set_answer(const grpc::Status& answer) { answer_ = answer; }

 private:
  void start_read(grpc::ByteBuffer* message, void* tag) override { stream_.Read(message, tag); }
  void start_write(const grpc::ByteBuffer& message, void* tag) override { stream_.Write(message, tag); }
  void start_finish(grpc::Status* status, void* tag) override {
    *status = answer_;
    stream_.Finish(answer_, tag);
  }

  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter stream_;
  grpc::Status answer_{grpc::CANCELLED, "the learner has ended the stream"};
  void* done_ = nullptr;
  std::atomic<bool> has_left_{false};
};

// A server that listens nowhere itself starts with credentials that are of no use, and refuses everybody.
void check_certificate(const std::shared_ptr<grpc::ServerCredentials>& credentials) {
  grpc::AsyncGenericService service;
  grpc::ServerBuilder builder;
  builder.RegisterAsyncGenericService(&service);
  builder.AddListeningPort("127.0.0.1:0", credentials);
  const auto queue = builder.AddCompletionQueue();
  const auto server = builder.BuildAndStart();
  if (server) server->Shutdown();
  queue->Shutdown();
  void* tag;
  bool ok;
  while (queue->Next(&tag, &ok)) {
  }
  if (!server) throw std::invalid_argument("the certificate is bad, or is not the key's");
}

// Takes as long for every text of a length, so that the time tells nothing about the token.
bool equal(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

// A stream of a server that has called.
class DialedStream : public GrpcStream {
 public:
  DialedStream(GrpcLoop& loop, std::shared_ptr<DialedCall> call, milliseconds env_timeout)
      : GrpcStream(loop, readable(call->peer()), env_timeout), dialed_(call) {
    call_ = std::move(call);
  }

  // Reads the first message. `came` gets OK, or why it is none.
  void read_hello(std::function<void(const grpc::Status& status)> came) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      set_timeout(kHelloTimeout);
    }
    dialed_->read(&message_, [self = shared(), came = std::move(came)](bool ok) {
      bool late;
      {
        std::lock_guard<std::mutex> lock(self->mutex_);
        self->end_timeout();
        late = self->is_late();
      }
      // Another call may be quicker.
      if (late) return came({grpc::DEADLINE_EXCEEDED, "it has said no hello within " + seconds(kHelloTimeout)});
      if (!ok) return came({grpc::INVALID_ARGUMENT, "it has left without a hello, or its hello is too long"});
      try {
        grpc::ProtoBufferReader reader(&self->message_);
        self->spec_ = beast::read_hello(&reader, self->message_.Length());
        self->set_row(self->spec_);
      } catch (const std::exception& error) {
        return came({grpc::INVALID_ARGUMENT, std::string("its hello cannot be used: ") + error.what()});
      }
      came(grpc::Status::OK);
    });
  }

  void open(uint64_t seed, Owner* owner) override {
    owner_ = owner;
    seed_ = seed;
    owner->opened(spec_);
  }

  void read_first_row(std::vector<std::byte*> destinations) override {
    const auto say_hello = [&](GrpcCall&, Then then) {
      dialed_->send_headers("hello-bin", learner_hello(seed_, spec_.env, false, progress_), std::move(then));
    };
    exchange(say_hello, std::move(destinations), kResetTime);
  }

  bool has_left() const override { return dialed_->has_left(); }

  void refuse(const std::string& why) override { turn_away({grpc::FAILED_PRECONDITION, why.substr(0, 2000)}); }

  void turn_away(const grpc::Status& why) {
    dialed_->set_answer(why);
    end_politely();
  }

  const StreamSpec& spec() const { return spec_; }
  const std::string& name() const { return name_; }

 private:
  std::shared_ptr<DialedStream> shared() { return std::static_pointer_cast<DialedStream>(shared_from_this()); }
  std::exception_ptr error_of(const grpc::Status&) override {
    return std::make_exception_ptr(ConnectionError("the env server has left"));
  }

  const std::shared_ptr<DialedCall> dialed_;
  StreamSpec spec_;
  uint64_t seed_ = 0;
};

}  // namespace

// A server with one limit for its messages.
class GrpcListener::Server {
 public:
  using OnHello = std::function<grpc::Status(Server& server, const std::shared_ptr<DialedStream>& stream)>;

  // `on_hello` gets each stream that has said its hello. A status other than OK turns it away.
  Server(GrpcListener& listener, size_t max_message_bytes, OnHello on_hello)
      : listener_(listener),
        options_(listener.options_),
        on_hello_(std::move(on_hello)),
        loop_(num_loop_threads(options_.max_streams)) {
    grpc::ServerBuilder builder;
    std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials();
    if (!options_.key.empty()) {
      grpc::SslServerCredentialsOptions tls;
      tls.pem_key_cert_pairs.push_back({options_.key, options_.certificate});
      credentials = grpc::SslServerCredentials(tls);
      check_certificate(credentials);
    }
    using Type = grpc::ServerBuilder::experimental_type::ExternalConnectionType;
    connections_ = builder.experimental().AddExternalConnectionAcceptor(Type::FROM_FD, credentials);
    builder.RegisterAsyncGenericService(&service_);
    builder.SetMaxReceiveMessageSize(static_cast<int>(std::min<size_t>(max_message_bytes, kMaxMessageBytes)));
    builder.SetMaxSendMessageSize(-1);
    builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);  // as in grpc_stream.cc
    // gRPC compares a message's length with the limit when it has all of it, but takes no more memory than its quota.
    grpc::ResourceQuota quota;
    quota.Resize((options_.max_streams + kMaxWaiting) * max_message_bytes + kQuotaBytes);
    builder.SetResourceQuota(quota);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 64);  // of a connection
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 5000);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, 20000);
    // A caller that is refused again and again is never idle. A call that goes on keeps its connection.
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, 30000);
    // A host that lost its power is missed within 50 seconds. Its own pings are no offence.
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
    accepted_ = builder.AddCompletionQueue();
    server_ = builder.BuildAndStart();
    if (!server_) {
      is_ending_ = true;
      accepted_->Shutdown();
      take_calls();
      throw std::invalid_argument("cannot listen on " + listener_.address() + ": gRPC starts no server");
    }
    try {
      connections_thread_ = std::thread([this] { take_connections(); });
      calls_thread_ = std::thread([this] { take_calls(); });
    } catch (...) {  // the process may have no more threads
      end();
      throw;
    }
  }

  ~Server() { end(); }

  void refuse(const std::shared_ptr<DialedStream>& stream, grpc::StatusCode code, const std::string& why) {
    listener_.log_refusal("refused " + stream->name() + ": " + readable(why.substr(0, 2000)));
    stream->turn_away({code, why.substr(0, 2000)});
  }

 private:
  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_ending_ = true;
    }
    // gRPC leaves connections open that it gets during its shutdown.
    if (connections_thread_.joinable()) connections_thread_.join();
    // gRPC would send GOAWAY, and a client of Python that begins a call at that moment may try it again and again on the
    // same connection, for minutes and with gigabytes of memory.
    listener_.connections_.end_all();
    server_->Shutdown(std::chrono::system_clock::now());
    accepted_->Shutdown();
    calls_thread_.joinable() ? calls_thread_.join() : take_calls();
  }

  void take_connections() {
    while (!is_ending_) {
      const int connection = listener_.sockets_.accept(kAcceptTime);
      if (connection < 0) continue;
      // Each descriptor below that of a new connection is taken.
      const int limit = max_descriptors(), own = limit / 8;
      const size_t most = std::min<size_t>(limit / 4, kMaxUnknown);
      if (const std::string ended = listener_.connections_.add(connection, most); !ended.empty()) {
        listener_.log_refusal("closed the connection of " + ended + ", which has said no hello, for a new one: " +
                              std::to_string(most) + " may be without");
      }
      if (connection < limit - own) {
        grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
        parameters.fd = connection;
        connections_->HandleNewConnection(&parameters);
      } else {
        ::close(connection);
        listener_.log_refusal("closed a connection: all descriptors are taken but " + std::to_string(own) + " of " +
                              std::to_string(limit) + " (ulimit -n)");
      }
    }
  }

  void take_calls() {
    request();
    void* tag;
    bool ok;
    while (accepted_->Next(&tag, &ok)) {
      (*GrpcLoop::then_of(tag))(ok);
    }
  }

  void request() {
    const auto call = std::make_shared<DialedCall>(loop_);
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_ending_) return;
    call->request(service_, accepted_.get(), GrpcLoop::tag([this, call](bool ok) {
                    if (!ok) return call->forget();  // the server ends
                    request();
                    called(call);
                  }));
  }

  void called(const std::shared_ptr<DialedCall>& call) {
    const auto stream = std::make_shared<DialedStream>(loop_, call, options_.env_timeout);
    if (call->method() != kDialMethod) {
      return refuse(stream, grpc::UNIMPLEMENTED, "this is a learner that env servers dial: it serves no " + call->method());
    }
    const std::string source = source_of(call->peer());
    if (!options_.token.empty() && !listener_.guesses_.may_try(source)) {
      return refuse(stream, grpc::RESOURCE_EXHAUSTED, "too many wrong tokens came from there: dial again in a second");
    }
    if (!options_.token.empty() && !equal(call->header("authorization"), authorization(options_.token))) {
      listener_.guesses_.was_wrong(source);
      return refuse(stream, grpc::UNAUTHENTICATED, "the token is not the one of the learner's --token_file");
    }
    if (num_waiting_ >= kMaxWaiting) return refuse(stream, grpc::RESOURCE_EXHAUSTED, "too many say hello at a time");
    ++num_waiting_;
    loop_.watch(stream);
    stream->read_hello([this, call, stream](const grpc::Status& said) {
      --num_waiting_;
      if (!said.ok() && is_ending_) return stream->turn_away(said);  // its connection was ended here
      if (!said.ok()) return refuse(stream, said.error_code(), said.error_message());
      listener_.connections_.know(call->peer());
      const std::string id = call->header("beast-stream");
      const std::shared_ptr<DialedStream> predecessor = end_predecessor(id, stream);
      grpc::Status status = on_hello_(*this, stream);
      if (status.error_code() == grpc::RESOURCE_EXHAUSTED && predecessor) {
        status = {grpc::UNAVAILABLE, "the stream that this one comes back for has not ended yet: dial again"};
        std::lock_guard<std::mutex> lock(mutex_);
        streams_[id] = predecessor;  // it has the place
      }
      if (!status.ok()) stream->turn_away(status);
    });
  }

  // A host whose connection was cut dials again before the learner has noticed: its place is free soon. Returns the
  // stream that it had, if there was one.
  std::shared_ptr<DialedStream> end_predecessor(const std::string& id, const std::shared_ptr<DialedStream>& stream) {
    if (id.empty()) return nullptr;
    std::shared_ptr<DialedStream> predecessor;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto it = streams_.begin(); it != streams_.end();) it = it->second.expired() ? streams_.erase(it) : ++it;
      predecessor = std::exchange(streams_[id], stream).lock();
    }
    if (predecessor) predecessor->cancel();
    return predecessor;
  }

  GrpcListener& listener_;
  const ListenerOptions& options_;
  const OnHello on_hello_;
  grpc::AsyncGenericService service_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> connections_;
  std::unique_ptr<grpc::ServerCompletionQueue> accepted_;
  std::unique_ptr<grpc::Server> server_;
  std::thread connections_thread_, calls_thread_;
  std::atomic<int> num_waiting_{0};
  std::mutex mutex_;  // guards what follows
  std::atomic<bool> is_ending_{false};  // read by take_connections() without it
  std::map<std::string, std::weak_ptr<DialedStream>> streams_;
  GrpcLoop loop_;  // ends first, which waits for the calls: they use all of the above
};

GrpcListener::GrpcListener(const ListenerOptions& options) : options_(options), sockets_(options.address) {
  const auto ask = [this](Server& server, const std::shared_ptr<DialedStream>& stream) {
    const grpc::Status dial_again(grpc::UNAVAILABLE,
                                  "the learner knows the environments now and gets ready: dial again");
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_asking_) return dial_again;
    if (hellos_.size() >= size_t{kMaxWaiting}) return grpc::Status(grpc::RESOURCE_EXHAUSTED, "too many say hello at a time");
    hellos_.push_back({stream->spec(), [&server, stream, dial_again](const std::string& refusal) {
                         if (refusal.empty()) return stream->turn_away(dial_again);
                         server.refuse(stream, grpc::FAILED_PRECONDITION, refusal);
                       }});
    said_hello_.notify_all();
    return grpc::Status::OK;
  };
  server_ = std::make_unique<Server>(*this, kMaxHelloBytes, ask);
}

GrpcListener::~GrpcListener() { replace_server(nullptr); }

std::optional<StreamSpec> GrpcListener::first_hello(const Check& check, milliseconds timeout,
                                                    const std::function<void()>& interrupt) {
  const Clock::time_point until = Clock::now() + timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!spec_) {
    const milliseconds left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
    const bool came = said_hello_.wait_for(lock, std::min(left, milliseconds(100)), [this] { return !hellos_.empty(); });
    if (!came && left <= milliseconds(0)) return std::nullopt;
    lock.unlock();
    if (interrupt) interrupt();
    lock.lock();
    if (hellos_.empty()) continue;
    const Hello hello = std::move(hellos_.front());
    hellos_.pop_front();
    lock.unlock();
    const std::string refusal = check ? check(hello.spec) : "";
    hello.answer(refusal);
    lock.lock();
    if (!refusal.empty()) continue;
    spec_ = hello.spec;
    is_asking_ = false;
    for (const Hello& other : hellos_) other.answer("");
    hellos_.clear();
  }
  return spec_;
}

void GrpcListener::serve(Admit admit) {
  std::optional<StreamSpec> spec;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    spec = spec_;
    if (admit && is_closed_) throw std::invalid_argument("the listener is closed: make another one for this pool");
    if (admit && !spec) {
      throw std::invalid_argument("the listener has had no first_hello(): call that before the pool's run()");
    }
    if (admit && is_serving_) {
      throw std::invalid_argument("another pool takes streams of this listener: stop it first, or make a listener of "
                                  "another address for this pool");
    }
    is_serving_ = admit != nullptr;
  }
  replace_server(nullptr);
  if (!admit) return;
  const size_t longest = std::max(row_bytes(*spec), kMaxHelloBytes);
  const auto on_hello = [this, admit = std::move(admit)](Server&, const std::shared_ptr<DialedStream>& stream) {
    if (admit(stream, stream->name())) return grpc::Status::OK;
    return grpc::Status(grpc::RESOURCE_EXHAUSTED, "all " + std::to_string(options_.max_streams) +
                                                      " places of the learner are taken: start it with a higher "
                                                      "--max_streams");
  };
  try {
    replace_server(std::make_unique<Server>(*this, longest + kMaxErrorBytes, on_hello));
  } catch (...) {
    serve(nullptr);
    throw;
  }
}

void GrpcListener::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_serving_) throw std::runtime_error("a pool takes streams of this listener: stop it first");
    is_closed_ = true;
  }
  replace_server(nullptr);
  std::lock_guard<std::mutex> lock(mutex_);
  sockets_.close();
}

void GrpcListener::replace_server(std::unique_ptr<Server> server) {
  std::deque<Hello> unanswered;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_asking_ = false;
    unanswered.swap(hellos_);
    server_.swap(server);
  }
  unanswered.clear();  // the former server waits for their streams, and ends without the lock, as it may tell a hello
}

void GrpcListener::log_refusal(const std::string& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (refusals_.size() < kMaxRefusals) {
    refusals_.push_back(message);
  } else {
    ++num_more_refusals_;
  }
}

std::pair<std::vector<std::string>, int64_t> GrpcListener::refusals() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {std::exchange(refusals_, {}), std::exchange(num_more_refusals_, 0)};
}

}  // namespace beast
