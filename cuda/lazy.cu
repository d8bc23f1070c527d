// Steps of SGD and Adam that touch only groups with entries of a sparse gradient, and what brings the others up to date: the twin
// of native/src/lazy.cc, whose contract is in native/include/commlayer.h. A thread has a group, by its first entry; positions
// increase, so no two threads meet.
#include "common.cuh"

enum { GROUP = 16 };

CML_FN i64 behind(const u8* stamp, i64 group, i64 now) { return static_cast<u8>(now - stamp[group]); }

CML_FN bool begins(const u32* idx, i64 j) { return j == 0 || idx[j - 1] / GROUP != idx[j] / GROUP; }

CML_FN i64 last_of(i64 at, i64 n) { return at + GROUP < n ? at + GROUP : n; }

CML_FN void sgd_make_up(float* w, float* v, const float* p, bool momentum) {
  const float w0 = *w;
  if (momentum) {
    *w = __fadd_rn(w0, __fadd_rn(__fmul_rn(p[0], w0), __fmul_rn(p[1], *v)));
    *v = __fadd_rn(__fmul_rn(p[2], w0), __fmul_rn(p[3], *v));
  } else {
    *w = __fadd_rn(w0, __fmul_rn(p[0], w0));
  }
}

struct SgdStep {
  float rate, momentum, gain, decay;
  bool nesterov;
};

CML_FN void sgd_step(float* w, float* v, float g, const SgdStep& s) {
  float u = s.decay != 0.0f ? __fadd_rn(g, __fmul_rn(s.decay, *w)) : g;
  if (v) {
    *v = __fadd_rn(__fmul_rn(s.momentum, *v), __fmul_rn(s.gain, u));
    u = s.nesterov ? __fadd_rn(u, __fmul_rn(s.momentum, *v)) : *v;
  }
  *w = __fsub_rn(*w, __fmul_rn(s.rate, u));
}

// Without momentum v is null; stamp is null where all are up to date: then only the entries make a step.
CML_KERNEL sgd_sparse(float* w, float* v, i64 n, u8* stamp, i64 now, const float* rows, const u32* idx, const float* g, i64 k,
                      double rate, double momentum, double gain, double decay, i64 nesterov) {
  const SgdStep s = {static_cast<float>(rate), static_cast<float>(momentum), static_cast<float>(gain), static_cast<float>(decay),
                     nesterov != 0};
  for (i64 j = thread_of_grid(), step = threads_of_grid(); j < k; j += step) {
    if (!stamp) {
      sgd_step(w + idx[j], v ? v + idx[j] : nullptr, g[j], s);
    } else if (begins(idx, j)) {
      const i64 group = idx[j] / GROUP, end = last_of(group * GROUP, n);
      const float* row = rows + 4 * behind(stamp, group, now);
      i64 next = j;
      for (i64 i = group * GROUP; i < end; ++i) {
        float none = 0.0f;
        sgd_make_up(w + i, v ? v + i : &none, row, v != nullptr);
        sgd_step(w + i, v ? v + i : nullptr, next < k && idx[next] == i ? g[next++] : 0.0f, s);
      }
      stamp[group] = static_cast<u8>(now + 1);
    }
  }
}

CML_KERNEL sgd_catch_up(float* w, float* v, u8* stamp, i64 n, i64 now, const float* rows) {
  for (i64 at = GROUP * thread_of_grid(), step = GROUP * threads_of_grid(); at < n; at += step) {
    const float* row = rows + 4 * behind(stamp, at / GROUP, now);
    for (i64 i = at; i < last_of(at, n); ++i) {
      float none = 0.0f;
      sgd_make_up(w + i, v ? v + i : &none, row, v != nullptr);
    }
    stamp[at / GROUP] = static_cast<u8>(now);
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
CML_FN void adam_step(float* w, float* m, float* v, float g, const float* s) {
  *m = __fadd_rn(*m, __fmul_rn(s[1], __fsub_rn(g, *m)));
  *v = __fadd_rn(__fmul_rn(s[2], *v), __fmul_rn(__fmul_rn(s[3], g), g));
  const float u = __fdiv_rn(*m, __fadd_rn(__fdiv_rn(__fsqrt_rn(*v), s[4]), s[5]));
  *w = __fsub_rn(__fmul_rn(s[0], *w), __fmul_rn(s[6], u));
}

CML_KERNEL adam_sparse(float* w, float* m, float* v, i64 n, u8* stamp, i64 now, const float* rows, const u32* idx, const float* g,
                       i64 k, const float* s) {
  for (i64 j = thread_of_grid(), step = threads_of_grid(); j < k; j += step) {
    if (!stamp) {
      adam_step(w + idx[j], m + idx[j], v + idx[j], g[j], s);
    } else if (begins(idx, j)) {
      const i64 group = idx[j] / GROUP, end = last_of(group * GROUP, n);
      const float* row = rows + 8 * behind(stamp, group, now);
      i64 next = j;
      for (i64 i = group * GROUP; i < end; ++i) {
        adam_make_up(w + i, m + i, v + i, row);
        adam_step(w + i, m + i, v + i, next < k && idx[next] == i ? g[next++] : 0.0f, s);
      }
      stamp[group] = static_cast<u8>(now + 1);
    }
  }
}

CML_KERNEL adam_catch_up(float* w, float* m, float* v, u8* stamp, i64 n, i64 now, const float* rows) {
  for (i64 at = GROUP * thread_of_grid(), step = GROUP * threads_of_grid(); at < n; at += step) {
    const float* row = rows + 8 * behind(stamp, at / GROUP, now);
    for (i64 i = at; i < last_of(at, n); ++i) adam_make_up(w + i, m + i, v + i, row);
    stamp[at / GROUP] = static_cast<u8>(now);
  }
}
