// Compares function types of two headers, whose enums and structs are different types with the same shape.
#pragma once
#include <type_traits>

namespace compare {

struct Handle;

// The shape of a type. Enums become integers, and structs become handles; layouts are compared elsewhere.
template <class T, class = void> struct Shape {
    using type = T;
};
template <class T> struct Shape<T, std::enable_if_t<std::is_enum<T>::value>> {
    using type = std::conditional_t<sizeof(T) == 4, int, T>;
};
template <class T> struct Shape<T, std::enable_if_t<std::is_class<T>::value || std::is_union<T>::value>> {
    using type = Handle;
};
template <class T> struct Shape<T *> {
    using of = typename Shape<std::remove_const_t<T>>::type;
    using type = std::conditional_t<std::is_const<T>::value, const of, of> *;
};
template <class R, class... A> struct Shape<R(A...)> {
    using type = typename Shape<R>::type(typename Shape<A>::type...);
};

template <class A, class B> constexpr bool same() {
    return std::is_same<typename Shape<A>::type, typename Shape<B>::type>::value;
}

} // namespace compare
