// One thread of a block as a fiber: a stack and the switch to and from it. Knows no blocks and no kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define SHIM_ASAN 1
#else
#define SHIM_ASAN 0
#endif

#if defined(__x86_64__)

// Saves what a call must preserve, stores the stack pointer, and goes on where the other stack had stopped.
extern "C" void shim_switch(void** save, void* load);
__asm__(
    ".pushsection .text.shim_switch,\"axG\",@progbits,shim_switch,comdat\n"
    ".weak shim_switch\n.type shim_switch,@function\nshim_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size shim_switch,.-shim_switch\n.popsection\n");

#else
#include <ucontext.h>
#endif

namespace shim {

constexpr size_t kStackNbytes = SHIM_ASAN ? 256 << 10 : 64 << 10;

// Stacks are kept from launch to launch: touching fresh memory costs more than running a kernel.
inline std::vector<std::unique_ptr<char[]>>& spare_stacks() {
  static std::vector<std::unique_ptr<char[]>> stacks;
  return stacks;
}

class Context {
 public:
  Context() = default;
  Context(Context&&) = default;
  ~Context() {
    if (stack_) spare_stacks().push_back(std::move(stack_));
  }

  // The first switch to it calls entry(), which must never return.
  void start(void (*entry)()) {
    auto& spare = spare_stacks();
    if (spare.empty()) {
      stack_.reset(new char[kStackNbytes]);
    } else {
      stack_ = std::move(spare.back());
      spare.pop_back();
    }
#if defined(__x86_64__)
    auto top = reinterpret_cast<uintptr_t>(stack_.get() + kStackNbytes) & ~uintptr_t{15};
    auto** slots = reinterpret_cast<void**>(top) - 8;  // six registers, the entry, then its missing return address
    std::memset(slots, 0, 8 * sizeof(void*));
    slots[6] = reinterpret_cast<void*>(entry);
    sp_ = slots;
#else
    getcontext(&uc_);
    uc_.uc_stack.ss_sp = stack_.get();
    uc_.uc_stack.ss_size = kStackNbytes;
    uc_.uc_link = nullptr;
    makecontext(&uc_, entry, 0);
#endif
  }

  // Leaves `from` and goes on in `to`. A fiber that ends says so.
  static void change(Context& from, Context& to, [[maybe_unused]] bool ends = false) {
#if SHIM_ASAN
    __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_, to.bottom(), to.nbytes());
#endif
#if defined(__x86_64__)
    shim_switch(&from.sp_, to.sp_);
#else
    swapcontext(&from.uc_, &to.uc_);
#endif
#if SHIM_ASAN
    from.arrived(to);
#endif
  }

#if SHIM_ASAN
  // After every switch to this context; `main` learns the bounds of its own stack from the first switch away.
  void arrived(Context& other) {
    const void* bottom = nullptr;
    size_t nbytes = 0;
    __sanitizer_finish_switch_fiber(fake_, &bottom, &nbytes);
    if (!other.stack_) other.bottom_ = bottom, other.nbytes_ = nbytes;
  }
  const void* bottom() const { return stack_ ? stack_.get() : bottom_; }
  size_t nbytes() const { return stack_ ? kStackNbytes : nbytes_; }
#endif

 private:
  std::unique_ptr<char[]> stack_;
#if defined(__x86_64__)
  void* sp_ = nullptr;
#else
  ucontext_t uc_;
#endif
#if SHIM_ASAN
  void* fake_ = nullptr;
  const void* bottom_ = nullptr;
  size_t nbytes_ = 0;
#endif
};

}  // namespace shim
