/* What the operator of attention and the variants of its computation share. */
#ifndef CHRION_ATTENTION_H
#define CHRION_ATTENTION_H
#include <stdint.h>

/* The most queries of a tile, the keys of a block, and the most elements of a head. */
#define QUERIES 32
#define KEYS 64
#define WIDTH 256

typedef struct {
  int64_t heads, shared, width, rank, rotated, interleaved, columns;
  float scale, cap;
  int64_t shape[8];
} Attention;

/* What a tile needs: the queries and where their results belong, and how many keys each of them sees. */
typedef struct {
  const float *query[QUERIES];
  float *output[QUERIES];
  int64_t seen[QUERIES];
  int count;
} Tile;

/* Compute a tile, from its first keys and values on, with the instructions of any processor, AVX2 or AVX-512. */
void chrion_attend(const Attention *a, const Tile *tile, const float *keys, const float *values);
void chrion_attend_avx2(const Attention *a, const Tile *tile, const float *keys, const float *values);
void chrion_attend_avx512(const Attention *a, const Tile *tile, const float *keys, const float *values);

#endif
