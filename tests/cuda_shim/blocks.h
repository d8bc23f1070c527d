// Blocks of lockstep threads, several at a time, under a seeded scheduler. Knows no CUDA names and no kernels.
//
// Threads are fibers of one OS thread, so a run is repeated exactly by its seed. They change places only where threads wait for
// each other: at barriers and warp operations. The seed decides in which order blocks start and which warps go first.
// What hardware leaves undefined ends the launch with an error: a barrier or warp operation that not all of its threads
// reach at the same line, one that names a thread which has exited, and waiting without end.
#pragma once

#include "fiber.h"

#include <algorithm>
#include <functional>
#include <random>
#include <string>

namespace shim {

constexpr unsigned kWarp = 32;
constexpr long kPatience = 200000;  // passes without a thread ending or a barrier opening

enum class At { kReady, kBarrier, kWarp, kExited };
enum class Op { kSync, kBallot, kAny, kAll, kShuffle, kUp, kDown, kXor };

struct Block;

struct Thread {
  Context context;
  Block* block = nullptr;
  unsigned number = 0;
  At at = At::kReady;
  int line = 0;
  Op op = Op::kSync;
  unsigned mask = 0, lane_arg = 0;
  uint64_t value = 0, result = 0;
};

struct Block {
  unsigned number = 0;
  std::vector<Thread> threads;
  std::unique_ptr<char[]> shared;
  size_t shared_nbytes = 0;
};

struct Machine {
  Context main;
  Thread* current = nullptr;
  const std::function<void()>* body = nullptr;
  unsigned grid = 0, threads = 0;
  std::string error;
};
inline Machine machine;

inline std::string place(const Thread& t) {
  const char* where = t.at == At::kBarrier ? "waits at the barrier of line " : t.at == At::kWarp ? "waits for its warp at line "
                      : t.at == At::kExited ? "has exited; last seen at line " : "runs; last seen at line ";
  return "block " + std::to_string(t.block->number) + " thread " + std::to_string(t.number) + " " + where + std::to_string(t.line);
}

inline void fail(const std::string& what) {
  if (machine.error.empty()) machine.error = what;
}

inline void suspend(At at, int line) {
  Thread& t = *machine.current;
  t.at = at;
  t.line = line;
  Context::change(t.context, machine.main, at == At::kExited);
}

// From inside a thread: ends the launch.
inline void fault(const std::string& what, int line) {
  machine.current->line = line;
  fail(what + " (" + place(*machine.current) + ")");
  for (;;) suspend(At::kExited, line);
}

inline void enter() {
#if SHIM_ASAN
  machine.current->context.arrived(machine.main);
#endif
  (*machine.body)();
  for (;;) suspend(At::kExited, machine.current->line);
}

inline bool resolve_barrier(Block& block) {
  const Thread& first = block.threads[0];
  for (const Thread& t : block.threads)
    if (t.at != At::kBarrier || t.line != first.line) return false;
  for (Thread& t : block.threads) t.at = At::kReady;
  return true;
}

inline uint64_t warp_result(Thread* warp, unsigned lane) {
  const Thread& t = warp[lane];
  uint64_t votes = 0;
  for (unsigned l = 0; l < kWarp; ++l)
    if (t.mask >> l & 1 && warp[l].value) votes |= uint64_t{1} << l;
  unsigned from = lane;
  switch (t.op) {
    case Op::kSync: return 0;
    case Op::kBallot: return votes;
    case Op::kAny: return votes != 0;
    case Op::kAll: return votes == t.mask;
    case Op::kShuffle: from = t.lane_arg % kWarp; break;
    case Op::kUp: from = lane >= t.lane_arg ? lane - t.lane_arg : lane; break;
    case Op::kDown: from = lane + t.lane_arg < kWarp ? lane + t.lane_arg : lane; break;
    case Op::kXor: from = lane ^ t.lane_arg; break;
  }
  if (!(t.mask >> from & 1)) fail("a shuffle reads lane " + std::to_string(from) + ", which is not in the mask (" + place(t) + ")");
  return warp[from].value;
}

// The warp operation that t waits in, once all lanes of its mask are there.
inline void resolve_warp(Block& block, Thread& t) {
  const unsigned base = t.number / kWarp * kWarp;
  Thread* warp = &block.threads[base];
  for (unsigned l = 0; l < kWarp; ++l) {
    if (!(t.mask >> l & 1)) continue;
    if (base + l >= block.threads.size() || warp[l].at == At::kExited) {
      fail("a warp operation names lane " + std::to_string(l) + ", which is not there any more (" + place(t) + ")");
      return;
    }
    if (warp[l].at != At::kWarp || warp[l].line != t.line || warp[l].op != t.op || warp[l].mask != t.mask) return;
  }
  for (unsigned l = 0; l < kWarp; ++l)
    if (t.mask >> l & 1) warp[l].result = warp_result(warp, l);
  for (unsigned l = 0; l < kWarp; ++l)
    if (t.mask >> l & 1) warp[l].at = At::kReady;
}

// Runs every ready thread of some warps up to its next wait. Whether a thread ended or a barrier opened.
inline bool pass(Block& block, std::mt19937_64& random) {
  const unsigned count = static_cast<unsigned>(block.threads.size()), warps = (count + kWarp - 1) / kWarp;
  const unsigned begin = static_cast<unsigned>(random() % warps);
  const bool backwards = random() & 1;
  bool moved = false;
  for (unsigned w = 0; w < warps && machine.error.empty(); ++w) {
    if (warps > 1 && (random() & 3) == 0) continue;
    const unsigned base = (begin + w) % warps * kWarp, lanes = std::min(kWarp, count - base);
    for (unsigned l = 0; l < lanes && machine.error.empty(); ++l) {
      Thread& t = block.threads[base + (backwards ? lanes - 1 - l : l)];
      if (t.at != At::kReady) continue;
      machine.current = &t;
      Context::change(machine.main, t.context);
      moved = moved || t.at == At::kExited;
    }
    for (unsigned l = 0; l < lanes && machine.error.empty(); ++l)
      if (block.threads[base + l].at == At::kWarp) resolve_warp(block, block.threads[base + l]);
  }
  return resolve_barrier(block) || moved;
}

inline bool stuck(const Block& block) {
  return std::none_of(block.threads.begin(), block.threads.end(), [](const Thread& t) { return t.at == At::kReady; });
}

inline std::unique_ptr<Block> make_block(unsigned number) {
  auto block = std::make_unique<Block>();
  block->number = number;
  block->threads.resize(machine.threads);
  for (unsigned i = 0; i < machine.threads; ++i) {
    block->threads[i].block = block.get();
    block->threads[i].number = i;
    block->threads[i].context.start(enter);
  }
  return block;
}

// Runs body on every thread; an empty string or what went wrong.
inline std::string run(unsigned grid, unsigned threads, unsigned resident, uint64_t seed, const std::function<void()>& body) {
  std::mt19937_64 random(seed);
  machine.body = &body;
  machine.grid = grid;
  machine.threads = threads;
  machine.error.clear();
  std::vector<unsigned> order(grid);
  for (unsigned i = 0; i < grid; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  std::vector<std::unique_ptr<Block>> live;
  unsigned next = 0;
  long idle = 0;
  while (machine.error.empty()) {
    while (live.size() < resident && next < grid) live.push_back(make_block(order[next++]));
    if (live.empty()) break;
    const size_t pick = random() % live.size();
    idle = pass(*live[pick], random) ? 0 : idle + 1;
    const auto& threads_of = live[pick]->threads;
    if (std::all_of(threads_of.begin(), threads_of.end(), [](const Thread& t) { return t.at == At::kExited; })) {
      live.erase(live.begin() + static_cast<long>(pick));
    } else if (stuck(*live[pick])) {
      const auto waits = std::find_if(threads_of.begin(), threads_of.end(), [](const Thread& t) { return t.at != At::kExited; });
      const auto other = std::find_if(threads_of.begin(), threads_of.end(),
                                      [&](const Thread& t) { return t.at != waits->at || t.line != waits->line; });
      fail("threads of a block diverge: " + place(*waits) + (other == threads_of.end() ? "" : ", " + place(*other)));
    } else if (idle > kPatience) {
      fail("blocks wait for each other without end: " + place(live[pick]->threads[0]));
    }
  }
  return machine.error;
}

}  // namespace shim
