// The one check of a list of positions.
#pragma once

#include "dispatch.h"

namespace cml {

// Whether idx[0..k) is strictly increasing and below n.
bool positions_ok(const uint32_t* idx, int64_t k, int64_t n);

}  // namespace cml
