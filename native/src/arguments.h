// What the Python glue takes as an argument: memory with a kind of element, read from tensors and buffers. Knows no kernels.
#pragma once

#include <Python.h>

#include <cstdint>

namespace glue {

enum class Kind : uint8_t { f32, f16, bf16, u32, i8, u8, i64 };

// Borrows the memory of one argument for the length of a call. Throws nanobind's python_error when it does not fit.
class Memory {
 public:
  Memory(const char* name, PyObject* object, bool writable);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // All of an array whose elements must be of `kind`.
  template <class T>
  T* array(Kind kind, int64_t* n) const {
    require(kind);
    *n = count();
    return static_cast<T*>(data_);
  }

  // n elements in payload bytes, or in an array of that kind.
  template <class T>
  T* payload(Kind kind, int64_t n) const {
    require_payload(kind, n, sizeof(T));
    return static_cast<T*>(data_);
  }

  // The bytes, of which there are at least n, whatever the elements are.
  template <class T>
  T* bytes(int64_t n = 0) const {
    require_bytes(n);
    return static_cast<T*>(data_);
  }

  int64_t nbytes() const { return nbytes_; }

 private:
  bool from_tensor(PyObject* object, bool writable);
  void from_buffer(PyObject* object, bool writable);
  int64_t count() const { return nbytes_ / itemsize_; }
  bool is(Kind kind) const;
  void require(Kind kind) const;
  void require_bytes(int64_t n) const;
  void require_payload(Kind kind, int64_t n, int64_t itemsize) const;

  const char* name_;
  void* data_ = nullptr;
  int64_t nbytes_ = 0;
  int64_t itemsize_ = 1;
  char type_ = 'B';  // the buffer protocol's letter; 'E' for bfloat16, which has none
  bool held_ = false;
  Py_buffer buffer_;
};

// Sets a Python exception of `type` and throws it through nanobind.
[[noreturn]] void fail(PyObject* type, const char* format, ...);

}  // namespace glue
