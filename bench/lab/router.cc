// The lab's router: one thread that moves packets between the TUN devices of N namespaces, each behind a shaped access link.
//
//   router SEED NAMESPACE...     opens wan0 in each namespace, prints "ready", then runs commands from stdin, one reply line each:
//     set HOST KEY VALUE ...     KEY: up down (bits/s), delay (s), queue (s), loss (0..1), cut (0 or 1)      -> ok | error: ...
//     stats                      -> one line of JSON
//   The router ends at the end of stdin, so it cannot outlive the process that started it. Host x has the address 10.99.0.(x + 1).
//
// A host's link: its uplink is a token bucket with a queue bounded in seconds (tail drop), then the path's delay, which is
// the mean of the two hosts' delays (a round trip between i and j takes delay_i + delay_j), then the receiver's downlink with a
// queue of its own. Rates count IP bytes, including the headers of every segment. Departure times are computed: waking up late
// delays a packet, but does not lower a rate.
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <malloc.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <memory>
#include <queue>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "segments.h"

namespace {

using lab::kMaxHead;
using lab::kVnet;
using Nanos = int64_t;

constexpr size_t kLargest = kVnet + 65536;
constexpr size_t kCopyBelow = 16384;     // packets shorter than this move to memory of their own size; longer ones keep the read buffer
// Work per packet takes CPU time from the hosts, and times much shorter than a path's delay are not visible at its ends. So a
// super-packet is cut into parts that take this fraction of the delay on the slower of its links, within these limits.
constexpr double kPartOfDelay = 1.0 / 15, kPartSeconds[] = {250e-6, 1e-3};
// A sleep lasts a fraction of the shortest delay, so that a busy link does not cause a wake-up per packet.
constexpr double kSleepOfDelay = 1.0 / 30, kSleepSeconds[] = {50e-6, 500e-6};
constexpr int kBatch = 64;               // packets read from one device before the next device is read

struct Host {
  int fd = -1;
  double up_bps = 1e9, down_bps = 1e9, delay_s = 0, queue_s = 0.1, loss = 0;
  bool cut = false;
  Nanos up_free = 0, down_free = 0;  // when the link has sent all that it accepted
  std::mt19937_64 dice;
  uint64_t sent_nbytes = 0, sent_packets = 0, received_nbytes = 0, received_packets = 0;
  uint64_t dropped_up = 0, dropped_down = 0, dropped_cut = 0, dropped_loss = 0, refused = 0;  // packets
};

struct Packet {
  std::shared_ptr<uint8_t[]> data;
  size_t off = 0, len = 0, head_len = 0, wire = 0, segments = 0;
  size_t src = 0, dst = 0;
  bool at_hub = true;  // still before the receiver's downlink
  uint8_t head[kMaxHead];
};

struct Event {
  Nanos due;
  uint64_t seq;  // equal times leave in the order they were queued
  Packet* packet;
  bool operator<(const Event& other) const { return due != other.due ? due > other.due : seq > other.seq; }
};

std::vector<Host> hosts;
std::priority_queue<Event> events;
std::vector<Packet*> spare;
std::shared_ptr<uint8_t[]> scratch(new uint8_t[kLargest]);
uint64_t next_seq = 0, deliveries = 0, late_1ms = 0, late_5ms = 0;
Nanos late_max = 0;

Nanos now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

Nanos on_wire(size_t nbytes, double bps) { return static_cast<Nanos>(static_cast<double>(nbytes) * 8e9 / bps); }

[[noreturn]] void die(const std::string& what) {
  fprintf(stderr, "router: %s: %s\n", what.c_str(), strerror(errno));
  exit(1);
}

int open_device(const std::string& ns) {
  const int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  const int target = open(("/run/netns/" + ns).c_str(), O_RDONLY | O_CLOEXEC);
  if (home < 0 || target < 0 || setns(target, CLONE_NEWNET)) die("cannot enter namespace " + ns);
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq request{};
  strncpy(request.ifr_name, "wan0", IFNAMSIZ - 1);
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  if (fd < 0 || ioctl(fd, TUNSETIFF, &request)) die("cannot make a TUN device in " + ns);
  // With these the sender's kernel leaves segmentation and checksums to the device: packets of up to 64 KB at an MTU of 1500.
  // Kernels before 6.2 have no UDP segmentation, which only the self-check would use.
  constexpr unsigned kUdpOffload = 0x20 | 0x40, kTcpOffload = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO_ECN;
  if (ioctl(fd, TUNSETOFFLOAD, kTcpOffload | kUdpOffload) && ioctl(fd, TUNSETOFFLOAD, kTcpOffload)) die("cannot set offloads in " + ns);
  if (setns(home, CLONE_NEWNET)) die("cannot leave namespace " + ns);
  close(home), close(target);
  return fd;
}

Packet* take_packet() {
  if (spare.empty()) return new Packet;
  Packet* p = spare.back();
  spare.pop_back();
  return p;
}

void give_packet(Packet* p) {
  p->data.reset();
  spare.push_back(p);
}

double delay_between(const Host& a, const Host& b) { return (a.delay_s + b.delay_s) / 2; }

Nanos shortest_sleep() {
  double delay_s = 1;
  for (const Host& host : hosts) delay_s = std::min(delay_s, host.delay_s);
  return static_cast<Nanos>(1e9 * std::clamp(delay_s * kSleepOfDelay, kSleepSeconds[0], kSleepSeconds[1]));
}

// Puts p on its sender's uplink, or drops it.
void admit(Packet* p, Nanos now) {
  Host& from = hosts[p->src];
  const Host& to = hosts[p->dst];
  const Nanos start = std::max(now, from.up_free);
  if (from.cut) {
    from.dropped_cut += p->segments;
    return give_packet(p);
  }
  if (static_cast<double>(start - now) > from.queue_s * 1e9) {
    from.dropped_up += p->segments;
    return give_packet(p);
  }
  from.up_free = start + on_wire(p->wire, from.up_bps);
  from.sent_nbytes += p->wire, from.sent_packets += p->segments;
  if (from.loss > 0 && std::uniform_real_distribution<>(0, 1)(from.dice) < from.loss) {
    from.dropped_loss += p->segments;  // it occupied the wire nevertheless
    return give_packet(p);
  }
  p->at_hub = true;
  events.push({from.up_free + static_cast<Nanos>(delay_between(from, to) * 1e9), next_seq++, p});
}

// Cuts a packet read from host src (n bytes in scratch, the device's header first) into parts as its links require, and admits them.
void take_in(size_t src, size_t n, Nanos now) {
  if (n <= kVnet + 20) return;
  lab::DeviceHeader v;
  memcpy(&v, scratch.get(), kVnet);
  const uint8_t* packet = scratch.get() + kVnet;
  lab::Shape s;
  if (!lab::shape_of(v, packet, n - kVnet, &s)) return;
  const size_t dst = size_t{packet[19]} - 1;
  if (packet[16] != 10 || packet[17] != 99 || packet[18] != 0 || dst >= hosts.size() || dst == src) return;

  std::shared_ptr<uint8_t[]> data;
  if (n < kCopyBelow) {
    data.reset(new uint8_t[n]);
    memcpy(data.get(), scratch.get(), n);
  } else {
    data = scratch;
    scratch.reset(new uint8_t[kLargest]);
  }
  packet = data.get() + kVnet;

  const Host& from = hosts[src];
  size_t per_part = s.segments;
  if (s.super) {
    const Host& to = hosts[dst];
    const double part_s = std::clamp(delay_between(from, to) * kPartOfDelay, kPartSeconds[0], kPartSeconds[1]);
    const double part_nbytes = std::min(from.up_bps, to.down_bps) / 8 * part_s;
    per_part = static_cast<size_t>(part_nbytes / static_cast<double>(s.mss + s.head));
    if (from.loss > 0) per_part = 1;  // each segment is lost independently
    per_part = std::min(s.segments, std::max<size_t>(per_part, 1));
  }
  for (size_t first = 0; first < s.segments; first += per_part) {
    Packet* p = take_packet();
    p->data = data;
    p->src = src, p->dst = dst;
    if (per_part == s.segments) {
      memcpy(p->head, data.get(), kVnet);
      p->head_len = kVnet, p->off = kVnet, p->len = n - kVnet, p->segments = s.segments, p->wire = s.wire;
    } else {
      size_t off = 0;
      p->head_len = lab::cut_part(v, packet, s, first, per_part, p->head, &off, &p->len);
      p->off = kVnet + s.head + off;
      p->segments = (p->len + s.mss - 1) / s.mss;
      p->wire = p->len + p->segments * s.head;
    }
    admit(p, now);
  }
}

// Moves packets that are due at the hub to the receiver's downlink queue, and packets that leave that queue to the receiver.
void handle_due(Nanos now) {
  while (!events.empty() && events.top().due <= now) {
    const Event event = events.top();
    events.pop();
    Packet* p = event.packet;
    Host& to = hosts[p->dst];
    if (to.cut) {
      to.dropped_cut += p->segments;
      give_packet(p);
    } else if (p->at_hub) {
      const Nanos start = std::max(event.due, to.down_free);
      if (static_cast<double>(start - event.due) > to.queue_s * 1e9) {
        to.dropped_down += p->segments;
        give_packet(p);
        continue;
      }
      to.down_free = start + on_wire(p->wire, to.down_bps);
      p->at_hub = false;
      events.push({to.down_free, next_seq++, p});
    } else {
      iovec parts[2] = {{p->head, p->head_len}, {p->data.get() + p->off, p->len}};
      if (writev(to.fd, parts, 2) < 0)
        to.refused += p->segments;
      else
        to.received_nbytes += p->wire, to.received_packets += p->segments;
      const Nanos late = now_ns() - event.due;
      deliveries++, late_1ms += late > 1'000'000, late_5ms += late > 5'000'000;
      late_max = std::max(late_max, late);
      give_packet(p);
    }
  }
}

std::string stats() {
  rusage use;
  getrusage(RUSAGE_SELF, &use);
  const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6; };
  std::ostringstream out;
  out.precision(17);
  out << "{\"time_s\": " << static_cast<double>(now_ns()) * 1e-9 << ", \"cpu_s\": " << seconds(use.ru_utime) + seconds(use.ru_stime)
      << ", \"in_flight\": " << events.size() << ", \"deliveries\": " << deliveries << ", \"late_1ms\": " << late_1ms
      << ", \"late_5ms\": " << late_5ms << ", \"late_max_s\": " << static_cast<double>(late_max) * 1e-9 << ", \"hosts\": [";
  for (size_t i = 0; i < hosts.size(); i++) {
    const Host& h = hosts[i];
    out << (i ? ", " : "") << "{\"sent_nbytes\": " << h.sent_nbytes << ", \"sent_packets\": " << h.sent_packets
        << ", \"received_nbytes\": " << h.received_nbytes << ", \"received_packets\": " << h.received_packets
        << ", \"dropped_up\": " << h.dropped_up << ", \"dropped_down\": " << h.dropped_down << ", \"dropped_cut\": " << h.dropped_cut
        << ", \"dropped_loss\": " << h.dropped_loss << ", \"refused\": " << h.refused << "}";
  }
  out << "]}";
  late_max = 0;  // the maximum since the last call
  return out.str();
}

std::string obey(const std::string& line) {
  std::istringstream words(line);
  std::string verb, key;
  size_t index = 0;
  words >> verb;
  if (verb == "stats") return stats();
  if (verb != "set" || !(words >> index) || index >= hosts.size()) return "error: unknown command: " + line;
  Host& h = hosts[index];
  double value = 0;
  while (words >> key) {
    if (!(words >> value) || !(value >= 0)) return "error: bad value for " + key;
    if (key == "up" && value > 0) h.up_bps = value;
    else if (key == "down" && value > 0) h.down_bps = value;
    else if (key == "delay") h.delay_s = value;
    else if (key == "queue") h.queue_s = value;
    else if (key == "loss") h.loss = value;
    else if (key == "cut") h.cut = value != 0;
    else return "error: bad key or value: " + key;
  }
  return "ok";
}

// Reads from stdin and answers each complete line. False at end of file.
bool obey_stdin() {
  static std::string pending;
  char chunk[4096];
  const ssize_t n = read(STDIN_FILENO, chunk, sizeof chunk);
  if (n <= 0) return n < 0 && (errno == EINTR || errno == EAGAIN);
  pending.append(chunk, static_cast<size_t>(n));
  for (size_t end; (end = pending.find('\n')) != std::string::npos; pending.erase(0, end + 1)) {
    puts(obey(pending.substr(0, end)).c_str());
    fflush(stdout);
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc > 2 + 250) {
    fprintf(stderr, "usage: router SEED NAMESPACE...\n");
    return 2;
  }
  // Freed packet memory stays with the process: returning it and faulting it in again costs more than the copies.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 16 << 20);
  prctl(PR_SET_TIMERSLACK, 1);
  // The router has priority on a busy machine, so that the hosts' computing does not delay packets. With a nice value, one packet
  // in a hundred still waits 5 ms for a core; with the real-time class, one in a thousand.
  const sched_param first_come{1};
  if (sched_setscheduler(0, SCHED_FIFO, &first_come)) setpriority(PRIO_PROCESS, 0, -15);

  hosts.resize(static_cast<size_t>(argc - 2));
  std::vector<pollfd> waits{{STDIN_FILENO, POLLIN, 0}};
  for (size_t i = 0; i < hosts.size(); i++) {
    hosts[i].fd = open_device(argv[i + 2]);
    hosts[i].dice.seed(strtoull(argv[1], nullptr, 10) * 1000 + i);
    waits.push_back({hosts[i].fd, POLLIN, 0});
  }
  puts("ready");
  fflush(stdout);

  Nanos grain = shortest_sleep();
  for (;;) {
    handle_due(now_ns());
    timespec sleep{1000, 0};
    if (!events.empty()) {
      const Nanos wait = std::max(events.top().due - now_ns(), grain);
      sleep = {wait / 1'000'000'000, wait % 1'000'000'000};
    }
    if (ppoll(waits.data(), waits.size(), &sleep, nullptr) < 0) {
      if (errno != EINTR) die("ppoll");
      continue;
    }
    if (waits[0].revents) {
      if (!obey_stdin()) return 0;
      grain = shortest_sleep();
    }
    for (size_t i = 0; i < hosts.size(); i++) {
      if (!waits[i + 1].revents) continue;
      for (int k = 0; k < kBatch; k++) {
        const ssize_t n = read(hosts[i].fd, scratch.get(), kLargest);
        if (n < 0) break;
        take_in(i, static_cast<size_t>(n), now_ns());
      }
    }
  }
}
