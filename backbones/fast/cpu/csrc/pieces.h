// How a batch of tokens is cut into pieces that fit into a cache.
//
// Tokens are (B, P + H W): prefix tokens, then the map. A piece is some whole images, or of a large
// map some lines; then the line below it is mapped with it, and two lines are kept for the next.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>

#include "depthwise.h"

namespace mixerlab {

// Token numbers count from the first token of the piece's first image.
struct Piece {
  int64_t image, images;
  int64_t fresh, until;  // tokens that are new in this piece
  int64_t first, last;   // tokens whose neighbours are all there: what comes out
  int64_t keep;          // the oldest token that is still needed
};

struct Layout {
  int64_t prefix;
  MapSize size;

  int64_t count() const { return prefix + size.height * size.width; }

  // Tokens that a piece has at most: of a piece's window, its fresh ones, or its output.
  int64_t window(int64_t budget) const {
    return is_whole(budget) ? images(budget) * count() : prefix + (lines(budget) + 2) * size.width;
  }

  // Call `use(piece)` for all pieces of about `budget` tokens.
  template <class Use>
  void each_piece(int64_t batch, int64_t budget, Use use) const {
    if (is_whole(budget)) {
      for (int64_t image = 0; image < batch; image += images(budget)) {
        const int64_t now = std::min(images(budget), batch - image), tokens = now * count();
        use(Piece{image, now, 0, tokens, 0, tokens, 0});
      }
      return;
    }
    for (int64_t image = 0; image < batch; ++image) {
      int64_t fresh = 0;
      for (int64_t top = 0; top < size.height; top += lines(budget)) {
        const int64_t bottom = std::min(size.height, top + lines(budget));
        const int64_t until = line(std::min(size.height, bottom + 1));
        use(Piece{image, 1, fresh, until, top ? line(top) : 0, line(bottom),
                  top ? line(top - 1) : 0});
        fresh = until;
      }
    }
  }

  // Call `use(token, y)`, in parallel, for the first token of all lines among some tokens.
  template <class Use>
  void each_line(int64_t from, int64_t until, Use use) const {
    const int64_t all = lines_before(until), done = lines_before(from);
    at::parallel_for(done, all, 1, [&](int64_t begin, int64_t end) {
      for (int64_t job = begin; job < end; ++job)
        use(job / size.height * count() + line(job % size.height), job % size.height);
    });
  }

  // Call `use(token)` for all prefix tokens among some tokens.
  template <class Use>
  void each_prefix(int64_t from, int64_t until, Use use) const {
    for (int64_t image = (from + count() - 1) / count() * count(); image < until; image += count())
      for (int64_t token = image; token < image + prefix; ++token) use(token);
  }

 private:
  int64_t line(int64_t y) const { return prefix + y * size.width; }
  int64_t lines(int64_t budget) const { return std::max<int64_t>(1, budget / size.width); }
  bool is_whole(int64_t budget) const { return 2 * count() <= 3 * budget; }
  int64_t images(int64_t budget) const { return std::max<int64_t>(1, budget / count()); }
  // Lines that lie whole before a token, which begins a line or an image.
  int64_t lines_before(int64_t token) const {
    const int64_t rest = std::max<int64_t>(0, token % count() - prefix);
    return token / count() * size.height + rest / size.width;
  }
};

// The tokens of a piece in memory of its own, and those kept from the piece before.
template <class T>
class Window {
 public:
  Window(int64_t tokens, int64_t stride) : stride(stride), memory_(new T[tokens * stride]) {}

  T* at(int64_t token) { return memory_.get() + (token - first_) * stride; }

  // Make room for a piece.
  void slide(const Piece& piece) {
    if (piece.keep) std::copy(at(piece.keep), at(piece.fresh), memory_.get());
    first_ = piece.keep;
  }

  const int64_t stride;

 private:
  std::unique_ptr<T[]> memory_;
  int64_t first_ = 0;
};

}  // namespace mixerlab
