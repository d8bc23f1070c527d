// The glue of int4, dithering, one bit. Computes nothing.
#include "glue.h"

namespace glue {

void bind_quantisers(nb::module_& m) { static_cast<void>(m); }

}  // namespace glue
