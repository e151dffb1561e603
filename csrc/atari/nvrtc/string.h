// See stdint.h. NVRTC itself has memcpy and memset.
#pragma once

inline int strcmp(const char* a, const char* b) {
  for (; *a && *a == *b; ++a) ++b;
  return *a - *b;
}
