// The glue of block positions, random-k. Computes nothing.
#include "glue.h"

namespace glue {

void bind_sparse(nb::module_& m) { static_cast<void>(m); }

}  // namespace glue
