// Cuts TCP and UDP super-packets, as read from a TUN device with segmentation offload, into smaller packets. Does no I/O. IPv4
// only, since the lab uses nothing else.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lab {

// The device's header of every packet, in the machine's byte order. (linux/virtio_net.h is not C++.)
struct DeviceHeader {
  uint8_t flags, gso_type;
  uint16_t head_nbytes, gso_size, csum_start, csum_offset;
};
constexpr uint8_t kNeedsChecksum = 1, kGsoTcp4 = 1, kGsoUdp = 5, kGsoEcn = 0x80;

constexpr size_t kVnet = sizeof(DeviceHeader);
static_assert(kVnet == 10);
constexpr size_t kMaxHead = kVnet + 60 + 60;      // the longest IP and TCP headers

inline uint16_t get16(const uint8_t* p) { return static_cast<uint16_t>(p[0] << 8 | p[1]); }
inline void put16(uint8_t* p, uint32_t v) { p[0] = static_cast<uint8_t>(v >> 8), p[1] = static_cast<uint8_t>(v); }
inline uint32_t get32(const uint8_t* p) { return uint32_t{get16(p)} << 16 | get16(p + 2); }
inline void put32(uint8_t* p, uint32_t v) { put16(p, v >> 16), put16(p + 2, v & 0xffff); }

// Adds the one's complement sum of n bytes (n even) to sum; folded to 16 bits.
inline uint32_t ones_sum(const uint8_t* p, size_t n, uint32_t sum) {
  for (size_t i = 0; i + 1 < n; i += 2) sum += get16(p + i);
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return sum;
}

// The layout of a packet. segments: number of packets on the wire, 1 unless it is a super-packet.
struct Shape {
  bool super = false, tcp = false;
  size_t ip = 0, head = 0;  // nbytes of the IP header, and of IP and TCP or UDP headers together
  size_t mss = 0, payload = 0, segments = 1, wire = 0;
};

// packet: the n bytes of the IP packet that follow the device's header v. False if it is not a complete IPv4 packet.
inline bool shape_of(const DeviceHeader& v, const uint8_t* packet, size_t n, Shape* out) {
  if (n < 20 || packet[0] >> 4 != 4 || get16(packet + 2) > n) return false;
  Shape s;
  s.wire = n;
  const int kind = v.gso_type & ~kGsoEcn;
  if (kind == kGsoTcp4 || kind == kGsoUdp) {
    s.super = true, s.tcp = kind == kGsoTcp4;
    s.ip = (packet[0] & 15) * size_t{4};
    if (v.gso_size == 0 || packet[9] != (s.tcp ? 6 : 17) || s.ip < 20 || n < s.ip + 20) return false;
    s.head = s.ip + (s.tcp ? (packet[s.ip + 12] >> 4) * size_t{4} : 8);
    if (s.head < s.ip + 8 || n <= s.head) return false;
    s.mss = v.gso_size;
    s.payload = n - s.head;
    s.segments = (s.payload + s.mss - 1) / s.mss;
    s.wire = s.payload + s.segments * s.head;  // on the wire every segment carries the headers
  }
  *out = s;
  return true;
}

// Writes the headers of a part of a super-packet into head (kMaxHead bytes): the device's header, then the packet's headers. The
// part has `count` segments from `first` on; *off and *len give its payload bytes. Returns the number of bytes in head. The
// checksum stays partial (the sum over the pseudo header), as the kernel does for a device that offers to complete it.
inline size_t cut_part(const DeviceHeader& v, const uint8_t* packet, const Shape& s, size_t first, size_t count, uint8_t* head,
                       size_t* off, size_t* len) {
  constexpr uint8_t kFin = 0x01, kPsh = 0x08, kCwr = 0x80;
  *off = first * s.mss;
  *len = std::min(count * s.mss, s.payload - *off);

  const size_t checksum = s.tcp ? 16 : 6;
  DeviceHeader part{};
  part.flags = kNeedsChecksum;
  part.csum_start = static_cast<uint16_t>(s.ip);
  part.csum_offset = static_cast<uint16_t>(checksum);
  part.head_nbytes = static_cast<uint16_t>(s.head);
  if (*len > s.mss) part.gso_type = v.gso_type, part.gso_size = v.gso_size;
  std::memcpy(head, &part, kVnet);

  uint8_t* ip = head + kVnet;
  uint8_t* above = ip + s.ip;
  std::memcpy(ip, packet, s.head);
  put16(ip + 2, static_cast<uint32_t>(s.head + *len));
  put16(ip + 4, static_cast<uint32_t>(get16(ip + 4) + first));
  put16(ip + 10, 0);
  put16(ip + 10, ~ones_sum(ip, s.ip, 0) & 0xffff);

  const uint32_t above_nbytes = static_cast<uint32_t>(s.head - s.ip + *len);
  if (s.tcp) {
    put32(above + 4, static_cast<uint32_t>(get32(above + 4) + *off));
    if (*off + *len < s.payload) above[13] &= static_cast<uint8_t>(~(kFin | kPsh));
    if (first > 0) above[13] &= static_cast<uint8_t>(~kCwr);
  } else {
    put16(above + 4, above_nbytes);
  }
  put16(above + checksum, ones_sum(ip + 12, 8, ip[9] + above_nbytes));
  return kVnet + s.head;
}

}  // namespace lab
