// gRPC's own log. Only grpc_*.cc include gRPC's headers.
#pragma once

namespace beast {

// Whoever connects can make gRPC log what he sends. From now on it logs errors only, made safe to show, at most 20 lines
// a minute. A gRPC that cannot be told so logs nothing. With GRPC_TRACE set it logs as it always does.
void guard_grpc_log();

}  // namespace beast
