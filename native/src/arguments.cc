// Tensors through the DLPack exchange table of their type, all else through the buffer protocol.
#include "arguments.h"

#include <nanobind/nanobind.h>

#include <cstdarg>
#include <cstring>
#include <string>

namespace nb = nanobind;

namespace glue {
namespace {

// The part of the DLPack 1.x exchange table that is used: a borrowed view without a capsule, some 50 ns.
struct Dtype {
  uint8_t code, bits;
  uint16_t lanes;
};

struct TensorView {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  Dtype dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeTable {
  uint32_t major, minor;
  ExchangeTable* previous;
  void* allocate;
  void* from_object;
  void* to_object;
  int (*view)(void* object, TensorView* out);
};

// For messages. The stable ABI hides the structure of types.
std::string type_name(PyObject* object) {
  const nb::object name = nb::steal(PyType_GetName(Py_TYPE(object)));
  const char* text = name.is_valid() ? PyUnicode_AsUTF8AndSize(name.ptr(), nullptr) : nullptr;
  if (!text) PyErr_Clear();
  return text ? text : "an object";
}

// Looked up once per type; tensors, parameters and a subclass or two are all there is.
const ExchangeTable* exchange_table(PyTypeObject* type) {
  static PyTypeObject* known[4];
  static const ExchangeTable* tables[4];
  static int next = 0;
  for (int i = 0; i < 4; ++i)
    if (known[i] == type) return tables[i];
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (!capsule) {
    PyErr_Clear();
    return nullptr;
  }
  auto* table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  while (table && table->major != 1) table = table->previous;
  if (!table) {
    PyErr_Clear();
    return nullptr;
  }
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  Py_XDECREF(reinterpret_cast<PyObject*>(known[next]));
  known[next] = type;
  tables[next] = table;
  next = (next + 1) % 4;
  return table;
}

const char* spelled(Kind kind) {
  switch (kind) {
    case Kind::f32: return "float32";
    case Kind::f16: return "float16";
    case Kind::bf16: return "bfloat16";
    case Kind::u32: return "uint32 or int32";
    case Kind::i8: return "int8";
    case Kind::u8: return "uint8";
    case Kind::i64: return "int64";
  }
  return "?";
}

}  // namespace

[[noreturn]] void fail(PyObject* type, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  PyErr_FormatV(type, format, arguments);
  va_end(arguments);
  throw nb::python_error();
}

Memory::Memory(const char* name, PyObject* object, bool writable) : name_(name) {
  if (!from_tensor(object, writable)) from_buffer(object, writable);
}

Memory::~Memory() {
  if (held_) PyBuffer_Release(&buffer_);
}

bool Memory::from_tensor(PyObject* object, bool writable) {
  if (PyObject_CheckBuffer(object)) return false;
  const ExchangeTable* table = exchange_table(Py_TYPE(object));
  if (!table) {
    // A torch without the table: its numpy view has the buffer protocol.
    nb::object view = nb::steal(PyObject_CallMethod(object, "numpy", nullptr));
    if (!view.is_valid()) {
      PyErr_Clear();
      fail(PyExc_TypeError, "%s: got %s, allowed are contiguous CPU tensors, numpy arrays and bytes-like objects", name_,
           type_name(object).c_str());
    }
    from_buffer(view.ptr(), writable);
    return true;
  }
  TensorView t;
  if (table->view(object, &t) != 0) {
    PyErr_Clear();
    fail(PyExc_ValueError, "%s: the tensor has no memory that can be read; need a contiguous CPU tensor", name_);
  }
  constexpr int32_t kCpu = 1, kPinned = 3;  // DLPack's kDLCPU and kDLCUDAHost
  if (t.device_type != kCpu && t.device_type != kPinned)
    fail(PyExc_ValueError, "%s: the tensor is not on the CPU; move it with .cpu()", name_);
  int64_t n = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.strides && t.shape[d] > 1 && t.strides[d] != n) {
      bool empty = false;
      for (int e = 0; e < t.ndim; ++e) empty |= t.shape[e] == 0;
      if (!empty) fail(PyExc_BufferError, "%s: the tensor is not contiguous; pass x.contiguous()", name_);
    }
    n *= t.shape[d];
  }
  data_ = static_cast<char*>(t.data) + t.byte_offset;
  itemsize_ = (t.dtype.bits + 7) / 8;
  nbytes_ = n * itemsize_;
  const int bits = t.dtype.lanes == 1 ? t.dtype.bits : 0;
  switch (t.dtype.code) {
    case 0: type_ = bits == 8 ? 'b' : bits == 16 ? 'h' : bits == 32 ? 'i' : bits == 64 ? 'q' : '?'; break;
    case 1: type_ = bits == 8 ? 'B' : bits == 16 ? 'H' : bits == 32 ? 'I' : '?'; break;
    case 2: type_ = bits == 16 ? 'e' : bits == 32 ? 'f' : bits == 64 ? 'd' : '?'; break;
    case 4: type_ = bits == 16 ? 'E' : '?'; break;
    default: type_ = '?';
  }
  return true;
}

void Memory::from_buffer(PyObject* object, bool writable) {
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object, &buffer_, flags) != 0) {
    PyErr_Clear();
    fail(PyExc_BufferError, "%s: need a %scontiguous buffer, got %s", name_, writable ? "writable " : "",
         type_name(object).c_str());
  }
  held_ = true;
  data_ = buffer_.buf;
  nbytes_ = buffer_.len;
  itemsize_ = buffer_.itemsize > 0 ? buffer_.itemsize : 1;
  const char* format = buffer_.format ? buffer_.format : "B";
  if (std::strchr("@=<", format[0]) && format[0]) ++format;
  type_ = format[0] && !format[1] ? format[0] : '?';
  if (type_ == 'l' || type_ == 'q') type_ = itemsize_ == 4 ? 'i' : 'q';
  if (type_ == 'L' || type_ == 'Q') type_ = itemsize_ == 4 ? 'I' : '?';
  if (type_ == 'c') type_ = 'B';
}

bool Memory::is(Kind kind) const {
  switch (kind) {
    case Kind::f32: return type_ == 'f';
    case Kind::f16: return type_ == 'e' || type_ == 'H' || type_ == 'h';
    case Kind::bf16: return type_ == 'E' || type_ == 'H' || type_ == 'h';
    case Kind::u32: return type_ == 'I' || type_ == 'i';
    case Kind::i8: return type_ == 'b';
    case Kind::u8: return type_ == 'B';
    case Kind::i64: return type_ == 'q';
  }
  return false;
}

void Memory::require(Kind kind) const {
  if (!is(kind)) fail(PyExc_ValueError, "%s: elements of type '%c', need %s", name_, type_, spelled(kind));
}

void Memory::require_bytes(int64_t n) const {
  if (n > nbytes_)
    fail(PyExc_ValueError, "%s: holds %lld bytes, need %lld", name_, static_cast<long long>(nbytes_), static_cast<long long>(n));
}

void Memory::require_payload(Kind kind, int64_t n, int64_t itemsize) const {
  if (type_ != 'B' && (type_ != 'b' || kind != Kind::i8)) require(kind);
  require_bytes(n * itemsize);
}

}  // namespace glue
