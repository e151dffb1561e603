// NVRTC has its own: see stdint.h.
#pragma once
