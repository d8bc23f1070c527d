// Steps of SGD and Adam that touch only the entries of a sparse gradient, and what brings the others up to date: the twin of
// native/src/lazy.cc, whose contract is in native/include/commlayer.h. Positions increase, so no two threads meet.
#include "common.cuh"

CML_FN i64 behind(const u8* stamp, i64 i, i64 now) { return static_cast<u8>(now - stamp[i]); }

CML_FN void sgd_make_up(float* w, float* v, const float* p, bool momentum) {
  const float w0 = *w;
  if (momentum) {
    *w = __fadd_rn(w0, __fadd_rn(__fmul_rn(p[0], w0), __fmul_rn(p[1], *v)));
    *v = __fadd_rn(__fmul_rn(p[2], w0), __fmul_rn(p[3], *v));
  } else {
    *w = __fadd_rn(w0, __fmul_rn(p[0], w0));
  }
}

// Without momentum v is null; stamp is null where all are up to date.
CML_KERNEL sgd_sparse(float* w, float* v, u8* stamp, i64 now, const float* rows, const u32* idx, const float* g, i64 k, double rate,
                      double momentum, double gain, double decay, i64 nesterov) {
  const float mu = static_cast<float>(momentum), a = static_cast<float>(gain), d = static_cast<float>(decay);
  for (i64 j = thread_of_grid(), step = threads_of_grid(); j < k; j += step) {
    const i64 i = idx[j];
    float x = w[i], y = v ? v[i] : 0.0f;
    if (stamp) {
      sgd_make_up(&x, &y, rows + 4 * behind(stamp, i, now), v != nullptr);
      stamp[i] = static_cast<u8>(now + 1);
    }
    float u = d != 0.0f ? __fadd_rn(g[j], __fmul_rn(d, x)) : g[j];
    if (v) {
      y = __fadd_rn(__fmul_rn(mu, y), __fmul_rn(a, u));
      u = nesterov ? __fadd_rn(u, __fmul_rn(mu, y)) : y;
      v[i] = y;
    }
    w[i] = __fsub_rn(x, __fmul_rn(static_cast<float>(rate), u));
  }
}

CML_KERNEL sgd_catch_up(float* w, float* v, u8* stamp, i64 n, i64 now, const float* rows) {
  for (i64 i = thread_of_grid(), step = threads_of_grid(); i < n; i += step) {
    float x = w[i], y = v ? v[i] : 0.0f;
    sgd_make_up(&x, &y, rows + 4 * behind(stamp, i, now), v != nullptr);
    w[i] = x;
    if (v) v[i] = y;
    stamp[i] = static_cast<u8>(now);
  }
}

CML_FN void adam_make_up(float* w, float* m, float* v, const float* p) {
  const float q = __fsqrt_rn(*v);
  const float owed = __fadd_rn(__fdiv_rn(p[3], __fadd_rn(q, p[4])), __fdiv_rn(p[5], __fadd_rn(q, p[6])));
  *w = __fadd_rn(*w, __fsub_rn(__fmul_rn(p[0], *w), __fmul_rn(*m, owed)));
  *m = __fmul_rn(p[1], *m);
  *v = __fmul_rn(p[2], *v);
}

// s: keep, lerp, beta2, gain, root, eps, rate.
CML_KERNEL adam_sparse(float* w, float* m, float* v, u8* stamp, i64 now, const float* rows, const u32* idx, const float* g, i64 k,
                       const float* s) {
  for (i64 j = thread_of_grid(), step = threads_of_grid(); j < k; j += step) {
    const i64 i = idx[j];
    float x = w[i], y = m[i], z = v[i];
    if (stamp) {
      adam_make_up(&x, &y, &z, rows + 8 * behind(stamp, i, now));
      stamp[i] = static_cast<u8>(now + 1);
    }
    y = __fadd_rn(y, __fmul_rn(s[1], __fsub_rn(g[j], y)));
    z = __fadd_rn(__fmul_rn(s[2], z), __fmul_rn(__fmul_rn(s[3], g[j]), g[j]));
    const float u = __fdiv_rn(y, __fadd_rn(__fdiv_rn(__fsqrt_rn(z), s[4]), s[5]));
    w[i] = __fsub_rn(__fmul_rn(s[0], x), __fmul_rn(s[6], u));
    m[i] = y;
    v[i] = z;
  }
}

CML_KERNEL adam_catch_up(float* w, float* m, float* v, u8* stamp, i64 n, i64 now, const float* rows) {
  for (i64 i = thread_of_grid(), step = threads_of_grid(); i < n; i += step) {
    adam_make_up(w + i, m + i, v + i, rows + 8 * behind(stamp, i, now));
    stamp[i] = static_cast<u8>(now);
  }
}
