/* MPI_Allreduce of floats over sizes, timed as ddpdoctor times: a barrier before each call, the maximum over ranks of
 * each call, then the median. Prints "bytes microseconds" a line on rank 0.
 * Arguments: smallest and largest size in bytes, factor, calls a size. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_size(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    if (argc != 5) MPI_Abort(MPI_COMM_WORLD, 2);
    size_t smallest = strtoull(argv[1], NULL, 10), largest = strtoull(argv[2], NULL, 10);
    int factor = atoi(argv[3]), calls = atoi(argv[4]), rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    float *from = malloc(largest), *to = malloc(largest);
    double *times = malloc(calls * sizeof *times), *slowest = malloc(calls * sizeof *slowest);
    for (size_t i = 0; i < largest / sizeof *from; i++) from[i] = to[i] = rank + 1;
    for (size_t size = smallest; size <= largest; size *= factor) {
        int count = (int)(size / sizeof *from), timed = size >= (16u << 20) && calls > 10 ? 10 : calls;
        for (int call = -3; call < timed; call++) {
            MPI_Barrier(MPI_COMM_WORLD);
            double began = MPI_Wtime();
            MPI_Allreduce(from, to, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            if (call >= 0) times[call] = MPI_Wtime() - began;
        }
        MPI_Reduce(times, slowest, timed, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0) {
            qsort(slowest, timed, sizeof *slowest, by_size);
            printf("%zu %.3f\n", size, slowest[timed / 2] * 1e6);
        }
    }
    MPI_Finalize();
    return 0;
}
