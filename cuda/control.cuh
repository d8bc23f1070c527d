// What the kernels of one sparse payload tell each other, and the host in the end. Knows no steps.
#ifndef CML_CONTROL
#define CML_CONTROL
#include "common.cuh"

#define MEND -1       // counts that are none: the host must look for entries again,
#define CLUSTERED -2  // or code them, since their positions are smaller as blocks

struct Control {
  i64 total, bad, first;  // as `select_over` leaves them
  i64 kept, kept_first;   // entries after trimming, and those of [start, n) among them
  i64 blocks;             // of 16 positions that hold any of them
  i64 count;              // entries of the payload; MEND or CLUSTERED if there is none
  i64 nbytes;
  i64 shifted;            // whether `shift` holds
  i64 infinite;           // a value became infinite by its cast
  double cut, slope, shift;
};

// How many of the entries that `select_over` left are to stay: more than `room` are trimmed to the k largest.
CML_FN i64 staying(const Control* control, i64 k, i64 cap, i64 room) {
  const i64 count = least(control->total, cap);
  return count > room && !control->bad ? k : count;
}

#endif
